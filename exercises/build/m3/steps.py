"""The steps of M3's course: pool, block tables, then the scheduler under scripted traffic."""

from __future__ import annotations

from collections import deque
from typing import Any

from exercises.build.check import Parts, Step, Wrong, expect
from exercises.build.device import Ask
from exercises.build.final import check_engine, check_random_traffic
from exercises.build.skeleton import File, Todo
from exercises.build.traffic import At, play
from m3_paged import EngineConfig

MILESTONE = "m3_paged"
TITLE = "paged KV memory: pool, block tables, preemption (2 to 3 hours)"
DONE = """All of it. Now let it serve, beside ours:

  python -m m3_paged.demo --scheduler exercises/build/m3/scheduler.py --explore runs/mine.html
  python -m m3_paged.bench --set scheduler=exercises/build/m3/scheduler.py
  python -m m3_paged.serve --scheduler exercises/build/m3/scheduler.py

Ours are block_pool.py, block_manager.py and scheduler.py in m3_paged/."""

FILES = [
    File(
        "m3_paged/block_pool.py",
        """M3, written by you: the physical KV blocks. Which are free, how many tables hold each.

No tensors and no requests: a block is a number. Begin here: `python -m exercises.build m3`""",
        {
            "BlockPool.allocate": "step 1: a deque gives its oldest entry, which is the block that "
            "has been free the longest, with popleft().",
            "BlockPool.share": "step 2: only a bug shares a free block. Assert first, then count.",
            "BlockPool.free": "step 1: count down; a block that nobody holds goes to the end of "
            "the free ones. Step 2: only a bug frees a free block; assert that somebody holds it.",
        },
    ),
    File(
        "m3_paged/block_manager.py",
        """M3, written by you: block tables, which say where each request's tokens lie.

    request a, 6 tokens, block_size 4          block pool
    block table [2, 0]                         0 |a4 a5  .  . |
        token 5 -> table[5 // 4] = 0           1 | .  .  .  . |  free
                   offset 5 % 4  = 1           2 |a0 a1 a2 a3 |
                   slot 0 * 4 + 1 = 1          3 | .  .  .  . |  free

A table grows by one block when its last is full. Two tables may name the same block (a shared
prompt); a request that writes into such a block first gets a copy of it (copy-on-write).

`self.events` tells the trace and its page what happens to blocks: append a `KVEvent`
(milestone_llm/core/kv.py) where a hint says so.""",
        {
            "BlockManager.num_blocks_for": "step 3: divide and round up.",
            "BlockManager.can_allocate": "step 3: compare num_blocks_for with what the pool has "
            "free.",
            "BlockManager.allocate": "step 3: as many blocks of the pool as the tokens need, in "
            'self.block_tables. Event: KVEvent("alloc", request_id, new blocks).',
            "BlockManager.free": "step 3: the pool takes back one block after the other, the last "
            'of the table first. Event: KVEvent("free", request_id, table, held), where held are '
            "those blocks of the table that other requests still hold.",
            "BlockManager.can_append": "step 4: how many blocks are lacking for `end` tokens, and "
            "are so many free? Step 5 adds one for each block that must be copied.",
            "BlockManager.append": "step 4: let the table grow; there is nothing to copy: []. "
            'Event: "alloc" with the new blocks, if there are any. Step 5: a block with reference '
            "count above 1 that is written into is replaced in this table, which self.num_copies "
            'counts. Event, before that: KVEvent("copy_on_write", request_id, [shared, own]).',
            "BlockManager.adopt": "step 5: the pool counts one more table for each block; the "
            'table is a list of its own. Event: KVEvent("share", request_id, blocks), if there are '
            "any.",
        },
        without=("BlockManager._grow", "BlockManager._shared_indices"),
    ),
    File(
        "m3_paged/scheduler.py",
        """M3, written by you: scheduling when memory is given out block by block.

A request is admitted when the blocks for its known tokens are free, and grows as it generates. When
a running request needs a block and none is free, the most recently admitted one is preempted
(PagedAttention, SOSP '23, section 4.5).

Begin with block_pool.py and block_manager.py; this file is steps 6 to 9. What is new beside M2:

- `self.kv` is your `BlockManager`.
- `self.preempter` (m3_paged/preemption.py): `preempt(victim, plan, reason)` takes a request's
  blocks and notes it in the plan; `swap_in(request, plan)` brings back what was swapped out. The
  lists `self.running` and `self.waiting` are yours: it does not touch them.
- A preempted request has `num_preemptions` above 0, and the status SWAPPED if its KV is in host
  memory. When it is admitted again, it goes into `plan.resumed` instead of `plan.admitted`.
- `plan.copies` are the blocks that must be copied before the step.
- Further completions of a prompt (n > 1) wait in `self.completions` (m3_paged/completions.py) until
  the first has computed it. Then `_add_row` starts them, as it is.""",
        {
            "Scheduler.schedule": "step 6: as in M2, in the order of `by_seniority`, but each "
            "running request asks `_make_room` before it gets its row. Step 7: a victim may not "
            "have had its turn; and nobody is admitted after a preemption.",
            "Scheduler.by_seniority": "step 6: by admission, which is the order of self.running; a "
            "list of its own, for self.running changes while a step is planned. Step 8: under "
            'policy="priority" sorted by self.waiting.key.',
            "Scheduler._make_room": "step 6: self.kv.append for tokens num_computed_tokens .. "
            "num_tokens - 1; what it returns belongs into plan.copies. Step 7: as long as "
            "can_append says no, the last of by_seniority goes, with a reason for people: out of "
            "running, into waiting.",
            "Scheduler.reason_to_wait": Todo(
                "step 6: the budget, as in M2, and memory: can the blocks for all known tokens be "
                "allocated? self.kv.describe says in words what is lacking.",
                first=2,
            ),
            "Scheduler._admit": "step 6: as in M2; the row comes from `_add_row`. Step 8: what was "
            "preempted is resumed, and what was swapped out is swapped in, before the status "
            "changes.",
            "Scheduler.free_memory": "step 6: if it has a block table, self.kv.free drops it. Step "
            "8: self.preempter.host is a BlockManager, too; a swapped request that is aborted has "
            "a table there.",
        },
    ),
]


# --- the pool -----------------------------------------------------------------------------------


class Ends(deque[int]):
    """Free blocks of which only the ends are in reach, at whatever length."""

    def _search(self, *unused: object) -> Any:
        raise Wrong(
            "The pool looks through its free blocks, or takes one from their middle. That takes "
            "the longer the larger the pool is, at every token: the two ends of a deque are enough."
        )

    __iter__ = __contains__ = __getitem__ = index = insert = remove = rotate = _search


def check_pool(parts: Parts) -> None:
    """Blocks go out and come back."""
    pool = parts.BlockPool(3)
    taken = [pool.allocate(), pool.allocate()]
    expect(
        "allocate() twice, of blocks 0, 1, 2",
        taken,
        [0, 1],
        "all are free; the first of free_blocks is the one that has been free the longest.",
    )
    expect("ref_counts", pool.ref_counts, [1, 1, 0], "one table each holds blocks 0 and 1.")
    pool.free(1)
    pool.free(0)
    expect("free(1), free(0): num_free", pool.num_free, 3, "nobody holds a block any more.")
    expect(
        "then allocate() three times",
        [pool.allocate() for _ in range(3)],
        [2, 1, 0],
        "longest free first: 2 was never taken, 1 came back before 0.",
    )
    pool.free(1)
    pool.free_blocks = Ends(pool.free_blocks)
    pool.allocate()
    pool.free(1)


def check_shared_pool(parts: Parts) -> None:
    """A block in several tables is free after the last of them."""
    pool = parts.BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    expect("allocate(), share(0): ref_counts", pool.ref_counts, [2, 0], "two tables hold block 0.")
    pool.free(block)
    expect("free(0): num_free", pool.num_free, 1, "another table still holds block 0.")
    pool.free(block)
    expect("free(0) again: num_free", pool.num_free, 2, "that was the last table.")
    for name in ("free", "share"):
        try:
            getattr(pool, name)(block)
        except AssertionError:
            continue
        raise Wrong(
            f"Nobody holds block 0, and {name}(0) does not complain. Only a bug does that, and it "
            "would give a block to two requests much later: assert that somebody holds it."
        )


# --- block tables -------------------------------------------------------------------------------


def manager(parts: Parts, num_blocks: int, block_size: int = 4) -> Any:
    """A block manager of the reader's over a pool that is right."""
    from m3_paged.block_pool import BlockPool

    return parts.BlockManager(BlockPool(num_blocks), block_size, [])


def check_tables(parts: Parts) -> None:
    """A table is made and dropped."""
    kv = manager(parts, 4)
    for num_tokens, wanted in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        num_blocks = kv.num_blocks_for(num_tokens)
        expect(
            f"num_blocks_for({num_tokens}), block_size 4",
            num_blocks,
            wanted,
            "a block that is partly filled is needed whole, one that is full suffices.",
        )
    expect(
        "can_allocate(16), can_allocate(17) of 4 blocks of 4",
        [kv.can_allocate(16), kv.can_allocate(17)],
        [True, False],
        "4 blocks are free; 17 tokens need 5.",
    )
    kv.allocate("a", 6)
    expect('allocate("a", 6): block_tables', kv.block_tables, {"a": [0, 1]}, "6 tokens: 2 blocks.")
    kv.allocate("b", 4)
    expect('allocate("b", 4): block_tables["b"]', kv.block_tables["b"], [2], "4 tokens: 1 block.")
    expect("can_allocate(5)", kv.can_allocate(5), False, "1 block is free, 2 are needed.")
    kv.free("a")
    expect('free("a"): block_tables', kv.block_tables, {"b": [2]}, "a has no table any more.")
    expect(
        "free blocks, longest free first",
        list(kv.pool.free_blocks),
        [3, 1, 0],
        "a gives its last block back first: in M4, the beginning of a prompt stays longest.",
    )
    _check_events(kv, [("alloc", "a", [0, 1]), ("alloc", "b", [2]), ("free", "a", [0, 1])])
    kv.check_invariants()


def check_growth(parts: Parts) -> None:
    """A table grows by a block when its last is full."""
    kv = manager(parts, 3)
    kv.allocate("a", 3)
    kv.allocate("b", 4)
    copies = kv.append("a", 3, 4)
    expect(
        'append("a", 3, 4) after 3 tokens',
        kv.block_tables["a"],
        [0],
        "token 3 goes into the last place of block 0.",
    )
    expect("what append returns", copies, [], "nothing is shared: there is nothing to copy.")
    expect('can_append("a", 4, 5)', kv.can_append("a", 4, 5), True, "block 2 is free for token 4.")
    kv.append("a", 4, 5)
    expect('append("a", 4, 5)', kv.block_tables["a"], [0, 2], "block 0 is full: a new one.")
    expect(
        'can_append("b", 4, 5)',
        kv.can_append("b", 4, 5),
        False,
        "b's block is full, and no block is free.",
    )
    expect(
        'can_append("a", 5, 6)',
        kv.can_append("a", 5, 6),
        True,
        "no block is free, but a needs none: block 2 has places left.",
    )
    _check_events(kv, [("alloc", "a", [0]), ("alloc", "b", [1]), ("alloc", "a", [2])])


def check_copy_on_write(parts: Parts) -> None:
    """Who writes into a shared block gets a copy of it."""
    kv = manager(parts, 5)
    kv.allocate("a", 6)
    kv.fork("a", "b")
    expect(
        'allocate("a", 6), fork("a", "b"): block_tables',
        kv.block_tables,
        {"a": [0, 1], "b": [0, 1]},
        "b begins with a's blocks.",
    )
    if kv.block_tables["a"] is kv.block_tables["b"]:
        raise Wrong("a and b have the same list as a table: when a grows, b grows with it.")
    expect("ref_counts", kv.pool.ref_counts[:2], [2, 2], "each of the two blocks is in two tables.")
    copies = kv.append("b", 6, 7)
    expect(
        'append("b", 6, 7)',
        (kv.block_tables["b"], copies),
        ([0, 2], [(1, 2)]),
        "token 6 falls into block 1, which a holds, too: b gets block 2, a copy. Block 0 is not "
        "written into and stays shared.",
    )
    expect("ref_counts", kv.pool.ref_counts[:3], [2, 1, 1], "b does not hold block 1 any more.")
    expect('append("a", 6, 7)', kv.append("a", 6, 7), [], "block 1 is a's alone by now.")
    expect("num_copies", kv.num_copies, 1, "one block was copied.")
    kv.free("a")
    _check_events(
        kv,
        [
            ("alloc", "a", [0, 1]),
            ("share", "b", [0, 1]),
            ("copy_on_write", "b", [1, 2]),
            ("free", "a", [0, 1]),
        ],
    )
    expect('held of the "free" event', kv.events[-1].held, [0], "b still holds block 0.")
    kv.check_invariants()
    full = manager(parts, 2)
    full.allocate("a", 6)
    full.fork("a", "b")
    expect(
        'can_append("b", 6, 7), both blocks shared and none free',
        full.can_append("b", 6, 7),
        False,
        "the copy needs a free block, although the table does not grow.",
    )


def _check_events(kv: Any, wanted: list[tuple[str, str, list[int]]]) -> None:
    for event in kv.events:
        if event.blocks is kv.block_tables.get(event.request_id):
            raise Wrong(
                f'The event "{event.type}" of {event.request_id} has the very list that is its '
                "block table: when the table grows, the event changes. It needs its own list."
            )
    got = [(event.type, event.request_id, event.blocks) for event in kv.events]
    expect("events", got, wanted, "the trace and its page know of blocks only what events tell.")


# --- the scheduler ------------------------------------------------------------------------------


def scheduler(parts: Parts, num_blocks: int, max_model_len: int = 16, **fields: Any) -> Any:
    """A scheduler of the reader's over a pool of this size."""
    config = EngineConfig(**{"max_num_seqs": 4, "block_size": 4, **fields})
    return parts.Scheduler(config, max_model_len, num_blocks)


def check_admission(parts: Parts) -> None:
    """Admission asks for blocks; requests grow."""
    play(
        scheduler(parts, 6),
        {0: [Ask("a", 6, 4), Ask("b", 9, 2), Ask("c", 9, 2)]},
        [
            At(
                "a[0:6] b[0:9] +a +b",
                "a takes 2 blocks of 4 and b 3. One of 6 is left, and c needs 3.",
                {"c": "blocks"},
            ),
            At("a[6:7] b[9:10]", "c still needs 3 blocks, and 1 is free.", {"c": "blocks"}),
            At(
                "a[7:8] c[0:9] +c",
                "b has finished and given back its 3 blocks: 4 are free. a's token 7 is the last "
                "in its second block.",
            ),
            At("a[8:9] c[9:10]", "a takes a third block for token 8; the last one was free."),
        ],
    )
    play(
        scheduler(parts, 8, 16, max_num_batched_tokens=16),
        {0: [Ask("a", 8, 2), Ask("b", 8, 1), Ask("c", 2, 1)], 1: [Ask("d", 15, 1)]},
        [
            At("a[0:8] b[0:8] +a +b", "16 tokens, just the budget.", {"c": "2"}),
            At("a[8:9] c[0:2] +c", "a's decode and c leave 13 tokens; d needs 15.", {"d": "15"}),
            At("d[0:15] +d"),
        ],
    )


def check_preemption(parts: Parts) -> None:
    """When no block is free, the newest goes."""

    def check_queue(own: Any, requests: Any) -> None:
        waiting = [request.request_id for request in own.waiting]
        expect("Who waits after this step", waiting, ["c", "d"], "c was preempted; d came later.")

    play(
        scheduler(parts, 4),
        {0: [Ask("a", 4, 3), Ask("b", 4, 3), Ask("c", 4, 3)], 1: [Ask("d", 1, 1)]},
        [
            At("a[0:4] b[0:4] c[0:4] +a +b +c", "a block each; one of 4 is left."),
            At(
                "a[4:5] b[4:5] -c",
                "a takes the last block for token 4. b needs one, too: c, admitted last, is "
                "preempted for it, and c's own turn is over. d waits behind c.",
                {"c": "b"},
            ),
            At("a[5:6] b[5:6]", "all 4 blocks are taken. c waits at the head of the queue."),
        ],
        {1: ("the queue should be c, d", check_queue)},
        is_whole=False,
    )
    play(
        scheduler(parts, 4),
        {0: [Ask("a", 6, 7), Ask("b", 5, 7)]},
        [
            At("a[0:6] b[0:5] +a +b", "two blocks each, none is left."),
            *(At(f"a[{n}:{n + 1}] b[{n - 1}:{n}]") for n in (6, 7)),
            At("a[8:9] -b", "a needs a third block: b, the newest, goes, and has no row."),
        ],
        is_whole=False,
    )
    play(
        scheduler(parts, 4),
        {0: [Ask("a", 5, 7), Ask("b", 6, 7)]},
        [
            At("a[0:5] b[0:6] +a +b", "two blocks each, none is left."),
            *(At(f"a[{n - 1}:{n}] b[{n}:{n + 1}]") for n in (6, 7)),
            At(
                "a[7:8] -b",
                "a's token 7 has a place. b needs a third block and is itself the newest: it goes.",
            ),
        ],
        is_whole=False,
    )
    play(
        scheduler(parts, 4, policy="priority"),
        {0: [Ask("high", 4, 4), Ask("low", 9, 2, priority=5)], 1: [Ask("mid", 1, 1, priority=2)]},
        [
            At("high[0:4] low[0:9] +high +low", "all 4 blocks are taken."),
            At(
                "high[4:5] -low",
                "high takes one of low's 3 blocks. mid has come and would fit into what is left; "
                "but memory is short, and whoever is admitted now is preempted next. So nobody is "
                "admitted in a step that preempts.",
            ),
            At("high[5:6] mid[0:1] +mid", "nobody was preempted: mid, the next one, is admitted."),
        ],
        is_whole=False,
    )


def check_resume(parts: Parts) -> None:
    """Preempted requests come back, by computing again or from host memory."""
    traffic = {0: [Ask("a", 4, 3), Ask("b", 4, 3), Ask("c", 4, 3)], 1: [Ask("d", 1, 1)]}
    play(
        scheduler(parts, 4),
        traffic,
        [
            At("a[0:4] b[0:4] c[0:4] +a +b +c"),
            At("a[4:5] b[4:5] -c"),
            At("a[5:6] b[5:6]"),
            At(
                "c[0:5] d[0:1] +d ^c",
                "all blocks are free. c is resumed, and no newcomer: its prompt and the token that "
                "it had are computed again. d is new.",
            ),
            At("c[5:6]"),
        ],
    )
    play(
        scheduler(parts, 4, preemption="swap"),
        traffic,
        [
            At("a[0:4] b[0:4] c[0:4] +a +b +c"),
            At("a[4:5] b[4:5] -c", "c's block is copied to host memory."),
            At("a[5:6] b[5:6]"),
            At("c[4:5] d[0:1] +d ^c", "c's KV comes back from host memory: only token 4 is new."),
            At("c[5:6]"),
        ],
    )
    play(
        scheduler(parts, 4, 12, policy="priority"),
        {0: [Ask("low", 3, 4, priority=5)], 1: [Ask("high", 4, 5)]},
        [
            At("low[0:3] +low"),
            At("low[3:4] high[0:4] +high", "low was there first; high is admitted."),
            At("high[4:5] low[4:5]", "a step serves the most urgent first."),
            At("high[5:6] low[5:6]"),
            *(At(f"high[{n}:{n + 1}]") for n in (6, 7)),
        ],
    )
    play(
        scheduler(parts, 3, 12, policy="priority"),
        {0: [Ask("low", 3, 7, priority=5)], 1: [Ask("high", 4, 6)]},
        [
            At("low[0:3] +low"),
            At("low[3:4] high[0:4] +high"),
            At(
                "high[4:5] -low",
                "each needs a block and one is free: low, admitted first but less urgent, goes.",
            ),
            *(At(f"high[{n}:{n + 1}]") for n in (5, 6, 7, 8)),
            At("low[0:5] ^low"),
            *(At(f"low[{n}:{n + 1}]") for n in (5, 6, 7, 8)),
        ],
    )

    play(
        scheduler(parts, 2, 8, policy="priority"),
        {0: [Ask("low", 3, 4, priority=5)], 1: [Ask("high", 4, 3)]},
        [
            At("low[0:3] +low"),
            At("low[3:4] high[0:4] +high", "both blocks are taken."),
            At("high[4:5] -low", "low goes for high before its own turn, and so has none."),
            At("high[5:6]"),
            At("low[0:5] ^low"),
            At("low[5:6]"),
        ],
    )

    def abort(own: Any, requests: Any) -> None:
        own.finish(requests["c"], "abort")
        if own.preempter.host.block_tables:
            raise Wrong(
                "c was swapped out and then aborted; host memory still has its blocks: "
                f"{own.preempter.host.block_tables}. free_memory gives these back, too."
            )

    play(
        scheduler(parts, 4, preemption="swap"),
        {0: traffic[0]},
        [
            At("a[0:4] b[0:4] c[0:4] +a +b +c"),
            At("a[4:5] b[4:5] -c"),
            At("a[5:6] b[5:6]"),
        ],
        {1: ("c, which is swapped out, is aborted", abort)},
    )

    def restart(own: Any, requests: Any) -> None:
        own.restart(requests.values())

    play(
        scheduler(parts, 4),
        {0: [Ask("a", 4, 3), Ask("b", 3, 2)]},
        [
            At("a[0:4] b[0:3] +a +b"),
            At("a[0:5] b[0:4] ^a ^b", "all memory was given back: both are computed again."),
            At("a[5:6]"),
        ],
        {0: ("an exception somewhere: all KV is dropped, requests keep their tokens", restart)},
    )


def check_traffic(parts: Parts) -> None:
    """Random traffic, the same decisions as M3's."""

    def make(kind: Any, rng: Any) -> Any:
        block_size = rng.choice((1, 2, 4))
        config = EngineConfig(
            max_num_seqs=rng.randint(3, 5),
            max_num_batched_tokens=rng.randint(16, 32),
            policy=rng.choice(("fcfs", "priority")),
            preemption=rng.choice(("recompute", "swap")),
            block_size=block_size,
        )
        return kind(config, 16, rng.randint(16, 28) // block_size)

    def ask(name: str, rng: Any) -> Ask:
        n = rng.choice((1, 1, 1, 3))
        return Ask(name, rng.randint(1, 8), rng.randint(1, 8), priority=rng.randint(0, 2), n=n)

    check_random_traffic(make, "m3_paged", parts, ask)


def check_serves(parts: Parts) -> None:
    """A tiny model's tokens are those of M3."""
    check_engine("m3_paged", parts, max_num_seqs=6, kv_cache_tokens=64, block_size=4)


STEPS = [
    Step(
        "blocks go out and come back",
        "block_pool.py",
        "Write `allocate` and `free` of the pool: a block is free, or a table holds it.",
        check_pool,
    ),
    Step(
        "a block in several tables",
        "block_pool.py",
        "Write `share`. A block that several tables hold is free after the last of them. Freeing "
        "or sharing a free one is a bug, and is asserted.",
        check_shared_pool,
    ),
    Step(
        "a block table",
        "block_manager.py",
        "Write `num_blocks_for`, `can_allocate`, `allocate` and `free`. Each change of a table is "
        "told in `self.events`.",
        check_tables,
    ),
    Step(
        "a table grows",
        "block_manager.py",
        "Write `can_append` and `append`: before tokens are written, the table must have places "
        "for them. Nothing is shared yet.",
        check_growth,
    ),
    Step(
        "shared tables, copy-on-write",
        "block_manager.py",
        "Write `adopt`, by which `fork` gives a second completion the blocks of the prompt. Then "
        "`append`: who writes into a block that others hold gets a copy of its own. And "
        "`can_append` counts the block that a copy needs.",
        check_copy_on_write,
    ),
    Step(
        "admission by blocks",
        "scheduler.py",
        "The scheduler of M2, with memory in blocks: a request is admitted when the blocks for its "
        "known tokens are free, and a running one takes a further block when its last is full.",
        check_admission,
    ),
    Step(
        "preemption",
        "scheduler.py",
        "When a running request needs a block and none is free, the last of `by_seniority` is "
        "preempted, perhaps several, perhaps the request itself. Nobody is admitted in that step.",
        check_preemption,
    ),
    Step(
        "resumed, swapped, by priority",
        "scheduler.py",
        "A preempted request is admitted like any other, and counts as resumed. If it was swapped "
        'out, its KV is brought back. Under policy="priority" the least urgent is the victim.',
        check_resume,
    ),
    Step(
        "random traffic",
        "scheduler.py",
        "Nothing new to write: the same decisions as M3's scheduler, whatever comes, completions "
        "of a prompt included.",
        check_traffic,
    ),
    Step(
        "your engine serves a model",
        "scheduler.py",
        "Nothing new to write: an engine with your parts gives the same tokens as M3.",
        check_serves,
        seconds=100,
        needs_model=True,
    ),
]
