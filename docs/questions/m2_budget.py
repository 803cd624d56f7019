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
    tokens: dict[str, list[int]] = {}
    for record in engine.tracer.records:
        done.append(done[-1] + record.num_prefill_tokens + record.num_decode_tokens)
        for row in record.batch:
            tokens.setdefault(row.request_id, []).append(done[-1])
    pause = max(after - before for before, after in pairwise(tokens.pop("r0")))
    firsts = sorted(positions[0] - done[4] for positions in tokens.values())
    print(
        f"{budget:6}{len(done) - 1:7}{1:8}{pause:13}{firsts[0]:14,}{firsts[-1]:11,}"
        f"{sum(firsts) / len(firsts):7,.0f}"
    )
