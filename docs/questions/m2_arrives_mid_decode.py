"""What happens to a request that arrives while others are in the middle of their output?

r0 and r1 want 12 and 30 tokens; r2 arrives before step 5 and wants 4.
"""

import m1_single
import m2_batching
from m1_single import SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem, serve


def item(num_prompt_tokens: int, num_tokens: int, arrival_step: int) -> WorkItem:
    """A request for exactly so many tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return WorkItem(list(range(5, 5 + num_prompt_tokens)), params, arrival_step)


items = [item(6, 12, 0), item(9, 30, 0), item(4, 4, 5)]
for package in (m1_single, m2_batching):
    engine = package.LLMEngine("tiny-llama", device="cpu", max_num_seqs=4, trace="memory")
    serve(engine, items)
    steps = {
        what: [record.step for record in engine.tracer.records if test(record)]
        for what, test in {
            "waits": lambda record: "r2" in record.waiting,
            "computed": lambda record: any(row.request_id == "r2" for row in record.batch),
        }.items()
    }
    print(f"{engine.milestone}: {len(engine.tracer.records)} steps")
    print(f"    r2 waits at the end of {len(steps['waits'])} steps")
    print(f"    r2 is computed in steps {steps['computed'][0]} to {steps['computed'][-1]}")
    first = engine.tracer.records[steps["computed"][0]]
    print(f"    step {first.step}:", ", ".join(f"{r.request_id} {r.phase}" for r in first.batch))
