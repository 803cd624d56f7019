"""What does a request for two completions do to the others? They begin with tokens of one row."""

import m5_kernels
from m1_single import SamplingParams
from m5_kernels.tools.pipeline_log import print_calls

for n in (1, 2):
    engine = m5_kernels.LLMEngine("tiny-llama", device="cpu", max_model_len=64, trace="memory")
    for request_id, wanted in (("r0", 1), ("r1", n)):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=wanted)
        engine.add_request([5, 9, 33], params, request_id=request_id)
    print(f"r1 wants n={n}")
    print_calls(engine)
