"""The life of "Hello" in the final engine, as its trace has it; then a second "Hello"."""

from m5_kernels import LLMEngine, SamplingParams

engine = LLMEngine("smollm2-135m", device="cpu", dtype="float32", max_model_len=64, trace="memory")
print("step  row                 blocks     what happened")
for _ in range(2):
    (output,) = engine.generate("Hello", SamplingParams(temperature=0, max_tokens=20), chat=True)
    records, engine.tracer.records[:] = list(engine.tracer.records), []
    for record in records:
        (row,) = record.batch
        notes = [f"{event.type} {event.blocks}" for event in record.events]
        if row.sampled_token is not None:
            notes.append(f"sampled {engine.tokenizer.decode([row.sampled_token])!r}")
        notes += [f"finished: {each['reason']}" for each in record.to_dict()["finished"]]
        if row.num_cached_tokens:
            notes.append(f"{row.num_cached_tokens} tokens found in the cache")
        if record.step in (0, 1, 2, 9, 10, 11):
            tokens = f"{row.phase} +{row.num_new_tokens} at {row.start}"
            print(f"{record.step:4}  {tokens:18}  {row.blocks!s:9}  {', '.join(notes) or '-'}")
        elif record.step == 3:
            print(" ...")
    print(f"      -> {output.text!r}\n" if records[0].step == 0 else " ...")
