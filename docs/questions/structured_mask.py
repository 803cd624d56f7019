"""What a grammar allows, step by step: two requests in one batch, one of them with a rule."""

import argparse

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    loaded = load_model(parser.parse_args().model)
    engine = LLMEngine(loaded.model, tokenizer=loaded.tokenizer, trace="memory")
    greedy = {"temperature": 0, "max_tokens": 30}
    rule = StructuredOutputsParams(json=PERSON)
    params = [
        SamplingParams(**greedy, structured_outputs=structured) for structured in (None, rule)
    ]
    free, ruled = engine.generate([PROMPT, PROMPT], params, chat=True)
    print(f"r0, free:  {free.text!r}")
    print(f"r1, ruled: {ruled.text!r} ({ruled.finish_reason})\n")
    print("step   allowed  token of r1")
    for record in engine.tracer.records:
        for row in record.batch:
            if row.request_id == "r1" and row.sampled_token is not None:
                text = loaded.tokenizer.decode([row.sampled_token])
                print(f"{record.step:4} {row.num_allowed_tokens:9,}  {text!r}")


if __name__ == "__main__":
    main()
