"""KV that windows give back: `python -m docs.questions.m4_lifetimes_memory`

M4's scheduler alone: each request that samples gets a token, and nothing is computed. `held` is the
KV of one request that has its last token, in tokens of all layers. `together` and `preempted` are
of 32 such requests, each with 1,024 tokens out, in memory for eight times their tokens. The last
lines are the `max_model_len` of an engine that is given none.
"""

from functools import partial

from m4_prefix_chunked.config import EngineConfig
from m4_prefix_chunked.hybrid.hybrid_cache import grouped_scheduler
from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

NUM_OUT, SIZE = 1024, 16
SHAPES = {
    "Gemma 3 27B": LayerGroups.of_windows((([1024] * 5 + [None]) * 11)[:62]),
    "gpt-oss-20b": LayerGroups.of_windows([128, None] * 12),
    "Mistral 7B v0.1": LayerGroups.of_windows([4096] * 32),
}


def serve(
    num_requests: int, num_tokens: int, num_blocks: int, groups: LayerGroups | None
) -> tuple[float, int, int]:
    """Return the most KV held, in tokens of all layers, the most requests that ran together, and
    the preemptions.

    num_blocks: blocks of all layers.
    """
    config = EngineConfig(
        max_num_seqs=64, block_size=SIZE, max_num_batched_tokens=2048, enable_prefix_caching=False
    )
    if groups is None:
        scheduler = Scheduler(config, num_tokens, num_blocks)
        share = 1.0
    else:
        scheduler = grouped_scheduler(
            Scheduler, config, num_tokens, groups.num_blocks(num_blocks), groups
        )
        share = groups.size / groups.num_layers
    params = SamplingParams(max_tokens=NUM_OUT, ignore_eos=True)
    for index in range(num_requests):
        request = Request(f"r{index}", [5] * (num_tokens - NUM_OUT), params, arrival=index)
        scheduler.add(request)
    held, together = 0.0, 0
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        together = max(together, len(scheduler.running))
        if all(row.phase == "decode" for row in plan.rows):
            held = max(held, scheduler.kv.num_used * SIZE * share)
        sampling = [request for row in plan.rows for request in row.sampling_requests]
        scheduler.update(plan, {each.request_id: [SampledToken(5)] for each in sampling})
        scheduler.drain_events()
    return held, together, int(scheduler.stats()["preemptions"])


print("                           held, one request     together   preempted")
print("                 tokens    one    groups  less   one groups one groups")
for name, groups in SHAPES.items():
    for num_tokens in (4_000, 8_000, 16_000, 32_000):
        own = -(-num_tokens // SIZE)
        alone = [serve(1, num_tokens, 2 * own, each)[0] for each in (None, groups)]
        many = [serve(32, num_tokens, 8 * own, each)[1:] for each in (None, groups)]
        print(
            f"{name:15} {num_tokens:7,} {alone[0]:7,.0f} {alone[1]:7,.0f} "
            f"{alone[0] / alone[1]:5.1f}x {many[0][0]:5} {many[1][0]:5} "
            f"{many[0][1]:6} {many[1][1]:5}"
        )

config = EngineConfig(block_size=SIZE, max_num_batched_tokens=2048)
for name, groups in SHAPES.items():
    num_blocks_for = partial(groups.num_whole_blocks_for, config)
    longest = config.length_that_fits(131_072, 8_000 // SIZE, num_blocks_for)
    print(f"{name:15} longest request in memory for 8,000 tokens: {longest:7,} tokens")
