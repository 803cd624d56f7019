"""One tenant has sent 24 long requests; then another asks a short question. How long does it wait?

A step stands for time here: no clock is involved. A lower priority is served sooner.
"""

from m1_single import SamplingParams
from m4_prefix_chunked import LLMEngine
from milestone_llm.lab.bench.workloads import WorkItem, serve

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)

print("                        steps from the question to      until the 24")
print("policy    its priority  its first token  its last       are done")
for policy, priority in (("fcfs", -1), ("priority", 0), ("priority", -1)):
    engine = LLMEngine("tiny-llama", device="cpu", policy=policy, max_num_seqs=4, trace="memory")
    items = [WorkItem([place + 3] * 16, LONG) for place in range(24)]
    items.append(WorkItem([99] * 16, SHORT, arrival_step=10, priority=priority))
    serve(engine, items)
    steps = {}
    for record in engine.tracer.records:
        for row in record.batch:
            if row.sampled_token is not None:
                steps.setdefault(row.request_id, []).append(record.step)
    short = steps.pop("r24")
    last = max(each[-1] for each in steps.values())
    waits = f"{short[0] - 9:14}{short[-1] - 9:14}{last + 1:14}"
    print(f"{policy:10}{priority:8}    {waits}")
