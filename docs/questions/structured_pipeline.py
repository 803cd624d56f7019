"""Steps of eight requests with and without one that has a rule: how many of M5's are launched
before the tokens of the step before are known, and how many M4 saves by guessing what is forced."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import m4_prefix_chunked
import m5_kernels
from m1_single import SamplingParams
from milestone_llm.models.tiny_models import build_tiny_model
from milestone_llm.structured import StructuredOutputsParams


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """An end, and a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"</s>": 0} | {letter: 1 + place for place, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZER = byte_tokenizer()
MODEL = build_tiny_model("llama", vocab_size=len(TOKENIZER), eos_token_id=0)
RULE = StructuredOutputsParams(regex="the answer is (yes|no), and nothing else[.!]")
PLAIN = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}


def steps(package, params, **fields):
    """Steps of a run, and how many of them were launched ahead."""
    engine = package.LLMEngine(
        MODEL, tokenizer=TOKENIZER, max_model_len=96, max_num_seqs=8, trace="memory", **fields
    )
    ahead = 0
    if engine.core.can_run_ahead is not None:
        launch = engine.core.runner.launch

        def counted(plan):
            nonlocal ahead
            ahead += any(row.request.num_in_flight for row in plan.rows)
            return launch(plan)

        engine.core.runner.launch = counted
    outputs = engine.generate(["prompt"] * len(params), params)
    return engine.stats()["steps"], ahead, [output.text for output in outputs]


def main() -> None:
    plain = [SamplingParams(**PLAIN)] * 8
    ruled = SamplingParams(temperature=0, max_tokens=48, structured_outputs=RULE)
    print("M5, steps launched before the tokens of the step before were known")
    for name, params in (
        ("eight free requests", plain),
        ("one of them with a rule", [ruled, *plain[1:]]),
    ):
        num_steps, ahead, _ = steps(m5_kernels, params)
        print(f"  {name:24} {ahead:3} of {num_steps}")
    print("M4, steps of one request with a rule")
    for speculation in (None, "ngram"):
        num_steps, _, (text,) = steps(m4_prefix_chunked, [ruled], speculation=speculation)
        print(f"  speculation={speculation!r:8} {num_steps:3}   {text!r}")


if __name__ == "__main__":
    main()
