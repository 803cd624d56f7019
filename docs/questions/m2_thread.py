"""Add requests from another thread, at times of its own, while this thread steps the engine."""

import threading
import time

from m2_batching import LLMEngine, SamplingParams

engine = LLMEngine("tiny-llama", device="cpu", max_num_seqs=4, trace="memory")


def clients() -> None:
    """Send a request every 30 ms. `add_request` and `abort` may be called from any thread."""
    for number in range(4):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.add_request([3 + number] * 8, params, request_id=f"client {number}")
        time.sleep(0.03)


thread = threading.Thread(target=clients)
thread.start()
while thread.is_alive() or engine.has_unfinished_requests():
    if engine.has_unfinished_requests():
        engine.step()
    else:
        time.sleep(0.001)  # there is no request yet
for record in engine.tracer.records:
    if record.arrived:
        who = ", ".join(row.request_id for row in record.batch)
        print(f"{1e3 * record.start_s:5.0f} ms  step {record.step:3}  computes {who}")
