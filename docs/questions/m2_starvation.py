"""Urgent requests come without end. When is the one served that is in no hurry?

A step stands for time. Aging: a request's priority counts less the longer it has waited. As all
age alike, the order of two waiting requests never changes. So a number that is fixed on arrival
does it: priority * patience + step of arrival.
"""

from m2_batching import LLMEngine, SamplingParams

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
NUM_URGENT, PATIENT_COMES = 40, 10

print("                   steps to the first token of     urgent ones")
print("                   the patient   the urgent, max   served before it")
for name, policy, patience in (
    ("fcfs", "fcfs", 0),
    ("priority", "priority", 0),
    ("aging by 8 steps", "priority", 8),
    ("aging by 2 steps", "priority", 2),
):
    engine = LLMEngine("tiny-llama", device="cpu", policy=policy, max_num_seqs=2, trace="memory")
    # Two rows of four tokens serve a request every other step; nine come in sixteen steps.
    coming = {f"urgent {n}": (n * 16 // 9, 0) for n in range(NUM_URGENT)}
    coming["patient"] = (PATIENT_COMES, 5)
    arrived = {request_id: step for request_id, (step, _) in coming.items()}
    firsts: dict[str, int] = {}
    step = 0
    while coming or engine.has_unfinished_requests():
        for request_id in [each for each in coming if arrived[each] == step]:
            _, priority = coming.pop(request_id)
            key = priority * patience + step if patience else priority
            engine.add_request([3, 5, 7, 9], PARAMS, request_id=request_id, priority=key)
        for output in engine.step() if engine.has_unfinished_requests() else ():
            firsts.setdefault(output.request_id, step)
        step += 1
    waits = {request_id: firsts[request_id] - arrived[request_id] for request_id in firsts}
    before = sum(firsts[each] < firsts["patient"] for each in firsts)
    urgent = max(wait for request_id, wait in waits.items() if request_id != "patient")
    print(f"{name:19}{waits['patient']:11}{urgent:18}{before:19}")
