"""What does a grammar allow, step by step? Two requests in one batch, one of them with a grammar.

Then that request alone: how many steps does it take, without draft tokens and with them?
"""

from m4_prefix_chunked import LLMEngine, SamplingParams
from milestone_llm.models.checkpoint import load_model
from milestone_llm.structured import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Who was the first person on the moon, and how old was he then? Answer in JSON."

loaded = load_model("smollm2-135m")
rule = StructuredOutputsParams(json=PERSON)
plain = SamplingParams(temperature=0, max_tokens=30)
ruled = SamplingParams(temperature=0, max_tokens=30, structured_outputs=rule)

engine = LLMEngine(loaded.model, tokenizer=loaded.tokenizer, trace="memory")
free, formed = engine.generate([PROMPT, PROMPT], [plain, ruled], chat=True)
print(f"r0, free:  {free.text!r}")
print(f"r1, ruled: {formed.text!r} ({formed.finish_reason})\n")
print("step   allowed  token of r1")
for record in engine.tracer.records:
    for row in record.batch:
        if row.request_id == "r1" and row.sampled_token is not None:
            text = loaded.tokenizer.decode([row.sampled_token])
            print(f"{record.step:4} {row.num_allowed_tokens:9,}  {text!r}")

for speculation in (None, "ngram"):
    engine = LLMEngine(loaded.model, tokenizer=loaded.tokenizer, speculation=speculation)
    engine.generate(PROMPT, ruled, chat=True)
    print(f"speculation={speculation!r}: {engine.stats()['steps']} steps")
