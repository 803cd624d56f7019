"""What does a request for two completions do to the others? They begin with tokens of one row."""

from docs.questions.m5_pipeline import PROMPT, make_engine, print_calls
from m1_single import SamplingParams

for n in (1, 2):
    engine = make_engine()
    for request_id, wanted in (("r0", 1), ("r1", n)):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=wanted)
        engine.add_request(PROMPT, params, request_id=request_id)
    print(f"r1 wants n={n}")
    print_calls(engine)
