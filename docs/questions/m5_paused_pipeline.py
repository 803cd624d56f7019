"""What does a request that only the host can sample do to the others? r1 asks for logprobs."""

import m5_kernels
from m1_single import SamplingParams
from m5_kernels.tools.pipeline_log import print_calls

for logprobs in (None, 2):
    engine = m5_kernels.LLMEngine("tiny-llama", device="cpu", max_model_len=64, trace="memory")
    for request_id, asked in (("r0", None), ("r1", logprobs)):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=asked)
        engine.add_request([5, 9, 33], params, request_id=request_id)
    print(f"r1 asks for logprobs={logprobs}")
    print_calls(engine)
