"""Does first come, first served meet a service level? `python -m docs.questions.question_deadlines`

Somebody who chats wants the first token within 8 steps of arriving, a batch job within 80. Both
come to M3 with three rows. A deadline is a priority: the step by which the first token is due, so
the earliest deadline is served first. A step stands for time here: no clock is involved.
"""

import random

from m3_paged import LLMEngine, SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem, serve

WITHIN = {"chat": 8, "job": 80}  # steps from the arrival to the first token
rng = random.Random(0)
kinds = [rng.choice(["chat", "job", "job"]) for _ in range(24)]
arrivals = [4 * index for index in range(24)]
tokens = {
    "chat": SamplingParams(max_tokens=6, ignore_eos=True),
    "job": SamplingParams(max_tokens=18, ignore_eos=True),
}


def first_tokens(policy: str) -> list[int]:
    """The step of each request's first token."""
    engine = LLMEngine("tiny-llama", device="cpu", max_num_seqs=3, policy=policy, trace="memory")
    items = [
        WorkItem([5] * 8, tokens[kind], arrival_step=at, priority=at + WITHIN[kind])
        for kind, at in zip(kinds, arrivals, strict=True)
    ]
    serve(engine, items)
    steps: dict[str, int] = {}
    for record in engine.tracer.records:
        for row in record.batch:
            if row.sampled_token is not None:
                steps.setdefault(row.request_id, record.step)
    return [steps[f"r{index}"] for index in range(len(items))]


print("within the deadline      chat         jobs       latest job")
for policy in ("fcfs", "priority"):
    waits = [step - at + 1 for step, at in zip(first_tokens(policy), arrivals, strict=True)]
    of = {kind: [w for w, k in zip(waits, kinds, strict=True) if k == kind] for kind in WITHIN}
    met = [f"{sum(w <= WITHIN[k] for w in of[k])} of {len(of[k])}" for k in WITHIN]
    name = {"fcfs": "fcfs", "priority": "earliest deadline"}[policy]
    print(f"{name:20} {met[0]:>9}    {met[1]:>9}    {max(of['job']):5} steps")
