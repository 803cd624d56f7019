"""What can a priority do? Time is counted in steps, from a request's arrival to its first token.

Starvation: urgent requests come without end, and one request is not urgent. With aging a request's
priority counts less the longer it has waited. As all age in the same way, the order of two waiting
requests never changes. So a number that is fixed on arrival is enough: priority * patience + step
of arrival.

A service level: a chat user wants the first token within 8 steps, a batch job within 80. A deadline
is a priority: the step by which the first token is due.
"""

import random

from m2_batching import LLMEngine
from milestone_llm.lab.bench.workloads import WorkItem, exactly, serve


def waits(policy: str, max_num_seqs: int, requests: list[tuple[int, int, int]]) -> list[int]:
    """Return the waits of requests (step of arrival, priority, output tokens), in order of
    arrival."""
    limits = {"max_num_seqs": max_num_seqs, "trace": "memory"}
    engine = LLMEngine("tiny-llama", device="cpu", policy=policy, **limits)
    serve(engine, [WorkItem([5] * 4, exactly(n), at, priority=p) for at, p, n in requests])
    first: dict[str, int] = {}
    for record in engine.tracer.records:
        for row in record.batch:
            first.setdefault(row.request_id, record.step)
    return [first[f"r{index}"] - at for index, (at, _, _) in enumerate(requests)]


# Two rows of four tokens serve a request every other step; nine urgent ones come in sixteen steps.
coming = sorted([*((n * 16 // 9, 0) for n in range(40)), (10, 5)])
patient = coming.index((10, 5))
print("starvation         steps of the patient   of the urgent, at most")
for name, policy, patience in (
    ("fcfs", "fcfs", 0),
    ("priority", "priority", 0),
    ("aging by 8 steps", "priority", 8),
    ("aging by 2 steps", "priority", 2),
):
    keys = [priority * patience + at if patience else priority for at, priority in coming]
    steps = waits(policy, 2, [(at, key, 4) for (at, _), key in zip(coming, keys, strict=True)])
    print(f"{name:19}{steps.pop(patient):20}{max(steps):25}")

WITHIN = {"chat": 8, "job": 80}
rng = random.Random(0)
kinds = [rng.choice(["chat", "job", "job"]) for _ in range(24)]
work = [(4 * n, 4 * n + WITHIN[kind], {"chat": 6, "job": 18}[kind]) for n, kind in enumerate(kinds)]
print("\nwithin the deadline      chat         jobs       latest job")
for name, policy in (("fcfs", "fcfs"), ("earliest deadline", "priority")):
    steps = waits(policy, 3, work)
    of = {kind: [w + 1 for w, k in zip(steps, kinds, strict=True) if k == kind] for kind in WITHIN}
    met = [f"{sum(w <= WITHIN[kind] for w in of[kind])} of {len(of[kind])}" for kind in WITHIN]
    print(f"{name:20} {met[0]:>9}    {met[1]:>9}    {max(of['job']):5} steps")
