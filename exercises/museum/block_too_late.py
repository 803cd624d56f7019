"""Five tokens are known, in one block of four slots: the next block is taken too late."""

from __future__ import annotations

from collections.abc import Iterator

from m3_paged.block_manager import BlockManager

from .exhibit import Arrival, Exhibit, Finding, Run, greedy

original = BlockManager.append


def append(self: BlockManager, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
    """Make room for tokens `start .. end - 1`, and for the one that they lead to."""
    return original(self, request_id, start, end + 1)


def suspicion(run: Run) -> Iterator[Finding]:
    """Yield rows of which more tokens are known than their blocks have room for."""
    known = dict.fromkeys(run.prompts, 0)
    for record in run.records:
        for row in record.batch:
            known[row.request_id] = row.end + (row.sampled_token is not None)
            if known[row.request_id] > run.engine.config.block_size * len(row.blocks or []):
                yield (
                    record.step,
                    (
                        f"{known[row.request_id]} tokens of {row.request_id} are known, and it has "
                        f"blocks {row.blocks}"
                    ),
                )


EXHIBIT = Exhibit(
    milestone="m3_paged",
    place="m3_paged.block_manager.BlockManager.append",
    broken=append,
    traffic=[Arrival(0, "a", [23, 42, 17], greedy(6))],
    invariant=suspicion,
    is_false_alarm=True,
    ask="Which line looks wrong, and is it?",
    text="""
question: After step 1 request a has five tokens, and its table has one block of four slots. The
  change takes the block a step earlier. What does it buy, and what does it cost?
cause: None: it is right. The token sampled last has no keys and values yet. They are computed in
  the next step, which is when they need a slot. Five tokens known are four computed.
invariant: A table has room for all tokens whose KV is computed, those of this step included. The
  last known token is not among them.
fix: None. With the change every request that ends on a full block takes one block in vain, and
  others are preempted for it. The tokens of both are right.
test:
  tests/m3/test_scheduler_rules.py::test_a_lone_request_grows_to_max_model_len_in_a_pool_of_just_that
seen: Asked again and again: why is the block taken when the length is 1 modulo the block size,
  and not 0?
threads: GeeeekExplorer/nano-vllm#30 (closed), GeeeekExplorer/nano-vllm#65 (closed),
  GeeeekExplorer/nano-vllm#66 (open), GeeeekExplorer/nano-vllm#91 (closed),
  GeeeekExplorer/nano-vllm#150 (closed), GeeeekExplorer/nano-vllm#152 (closed),
  GeeeekExplorer/nano-vllm#240 (open)
""",
    walk="""
call m3_paged/block_manager.py::BlockManager.append, when end == 4
This step computes position 3, the last slot of the block.
p (start, end)  # position 3 alone
p self.block_tables  # block 0 has slots 0 to 3
Try `u`: num_tokens is 4 here, and will be 5 after this step.
""",
)
