"""What does a larger step budget do? Eight prompts of 400 tokens come while one request decodes.

Computed positions stand for time.
"""

from itertools import pairwise

from m2_batching import LLMEngine, SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem, serve


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, and so many tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


items = [WorkItem([5] * 8, exactly(40))]
items += [WorkItem([7 + n] * 400, exactly(16), arrival_step=4) for n in range(8)]
print("                r0's longest pause    first tokens of the eight, positions")
print("budget  steps   steps    positions     first one   last one   mean")
for budget in (512, 2048, 4096):
    engine = LLMEngine(
        "tiny-llama",
        device="cpu",
        max_model_len=512,
        max_num_batched_tokens=budget,
        trace="memory",
    )
    serve(engine, items)
    done = [0]  # positions computed before each step
    steps: dict[str, list[int]] = {}  # in which each request got its tokens
    for record in engine.tracer.records:
        done.append(done[-1] + record.num_prefill_tokens + record.num_decode_tokens)
        for row in record.batch:
            if row.sampled_token is not None:
                steps.setdefault(row.request_id, []).append(record.step)
    pauses = list(pairwise(steps.pop("r0")))
    num_steps = max(after - before for before, after in pauses)
    num_positions = max(done[after + 1] - done[before + 1] for before, after in pauses)
    firsts = sorted(done[own[0] + 1] - done[4] for own in steps.values())
    print(
        f"{budget:6}{len(done) - 1:7}{num_steps:8}{num_positions:13}{firsts[0]:14,}{firsts[-1]:11,}"
        f"{sum(firsts) / len(firsts):7,.0f}"
    )
