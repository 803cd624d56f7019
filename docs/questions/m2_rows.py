"""What does M2's engine gain by more rows? Decode steps, timed, with 1 to 16 requests in them."""

import statistics
import time

from m2_batching import LLMEngine, SamplingParams
from milestone_llm.models.checkpoint import load_model

NUM_STEPS = 9
model = load_model("smollm2-135m", dtype="float32", device="cpu").model

print("rows    a step     a row    tokens/s")
for num_rows in (1, 2, 4, 8, 16):
    engine = LLMEngine(model, max_num_seqs=num_rows, max_model_len=128)
    for index in range(num_rows):
        params = SamplingParams(max_tokens=NUM_STEPS + 2, ignore_eos=True)
        engine.add_request([5 + index] * 64, params)
    engine.step()  # the prompts
    engine.step()  # a first step of this size
    times = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    print(
        f"{num_rows:4}{1e3 * seconds:7.0f} ms{1e3 * seconds / num_rows:7.0f} ms"
        f"{num_rows / seconds:10.1f}"
    )
