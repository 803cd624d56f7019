"""What does a request that only the host can sample do to the others? r1 asks for logprobs."""

from itertools import zip_longest

import m5_kernels
from m1_single import SamplingParams

for logprobs in (None, 2):
    engine = m5_kernels.LLMEngine("tiny-llama", device="cpu", max_model_len=64, trace="memory")
    for request_id, asked in (("r0", None), ("r1", logprobs)):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=asked)
        engine.add_request([5, 9, 33], params, request_id=request_id)
    calls = []
    while engine.has_unfinished_requests():
        calls.append(engine.step())
    print(f"r1 asks for logprobs={logprobs}")
    # Record number n of the trace is of the step that call n launched.
    for number, (outputs, record) in enumerate(zip_longest(calls, engine.tracer.records)):
        rows = [(row.request_id, row.num_new_tokens) for row in record.batch] if record else []
        launched = ", ".join(f"{name} +{count}" if count > 1 else name for name, count in rows)
        tokens = ", ".join(f"{each.request_id}: {each.token_ids[-1]}" for each in outputs)
        print(f"    call {number} launches {launched or 'nothing':14}  tokens {tokens or 'none'}")
