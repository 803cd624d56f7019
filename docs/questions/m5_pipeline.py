"""What does each call of step() launch, and whose tokens does it return?

Two equal requests; the second stops at a token that both will sample.
"""

from itertools import zip_longest

from m5_kernels import LLMEngine, SamplingParams

PROMPT = [5, 9, 33]
six = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
stop = LLMEngine("tiny-llama", device="cpu").generate([PROMPT], six)[0].token_ids[1]

limits = {"max_model_len": 64, "trace": "memory"}
engine = LLMEngine("tiny-llama", device="cpu", async_scheduling=True, **limits)
engine.add_request(PROMPT, six)
engine.add_request(
    PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[stop])
)
calls = []
while engine.has_unfinished_requests():
    calls.append(engine.step())
print(f"r0 wants 6 tokens; r1 has the same prompt and stops at token {stop}.")
print(" call  launches a step of  gets tokens")
# Record n of the trace belongs to the step that call n launched.
for number, (outputs, record) in enumerate(zip_longest(calls, engine.tracer.records)):
    rows = record.batch if record else []
    news = [f" +{row.num_new_tokens}" if row.num_new_tokens > 1 else "" for row in rows]
    launched = ", ".join(row.request_id + new for row, new in zip(rows, news, strict=True))
    tokens = ", ".join(f"{output.request_id}: {output.token_ids[-1]}" for output in outputs)
    notes = [f"{output.request_id} finished" for output in outputs if output.finished]
    notes += [f"{row.request_id}'s row is wasted" for row in rows if row.phase == "padding"]
    print(f"{number:5}  {launched or '-':18}  {tokens or '-':16}  {', '.join(notes)}".rstrip())
