"""Programs in vLLM's words: they run once the import is changed, or are told what to use instead.

Each is written anew after a topic of vLLM's examples. `from vllm import` becomes `from` a
milestone, and MODEL is a folder with a tiny model, a byte tokenizer and a chat template.
"""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from typing import Any

import pytest

from helpers.engines import every_milestone
from helpers.servers import save_tiny_model
from milestone_llm.core.errors import InputError

START = "from vllm import LLM, SamplingParams\n"
LLM_ = START + "llm = LLM(model=MODEL, max_model_len=128)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def run(package: str, program: str, folder: str) -> dict[str, Any]:
    """Run a program with its import changed; return the names that it leaves."""
    names: dict[str, Any] = {"MODEL": folder}
    exec(textwrap.dedent(program).replace("from vllm ", f"from {package} "), names)
    return names


BASIC = """
prompts = ["Hello, my name is", "The capital of France is"]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
outputs = llm.generate(prompts, params, use_tqdm=False)
for output, prompt in zip(outputs, prompts, strict=True):
    assert output.prompt == prompt
    assert len(output.outputs[0].token_ids) == 16 or output.outputs[0].finish_reason == "stop"
    assert isinstance(output.outputs[0].text, str)
"""
CHAT = """
talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
one = llm.chat(talk, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
two = llm.chat([talk, talk[1:]], sampling_params=SamplingParams(temperature=0, max_tokens=5))
assert [len(one), len(two)] == [1, 2]
assert one[0].outputs[0].token_ids == two[0].outputs[0].token_ids
assert "Be brief." in one[0].prompt and "Be brief." not in two[1].prompt
"""

PROGRAMS: dict[str, str] = {
    "basic": LLM_ + BASIC,
    "chat": LLM_ + CHAT,
    "progress": LLM_
    + """
assert llm.generate(["a", "b"], use_tqdm=True)[1].finished
""",
    "dtype auto": START
    + """
llm = LLM(model=MODEL, dtype="auto", seed=None, trust_remote_code=False, tensor_parallel_size=1,
          enforce_eager=True, load_format="auto", tokenizer_mode="auto")
assert llm.generate("a")[0].finished
""",
    "arguments that ask for nothing": LLM_
    + """
params = SamplingParams(temperature=0, max_tokens=4)
plain = llm.generate("ab", params)[0].outputs
assert llm.generate("ab", params, lora_request=None, priority=None)[0].outputs == plain
talk = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
asked = dict(add_generation_prompt=True, continue_final_message=False, chat_template=None)
assert llm.chat(talk, params, **asked)[0].outputs == llm.chat(talk, params)[0].outputs
""",
    "names of dtypes": START
    + """
import torch
for name, dtype in {"half": torch.float16, "float": torch.float32}.items():
    assert LLM(model=MODEL, dtype=name, max_model_len=32).model.dtype == dtype
""",
    "parameters twice": START
    + """
params = SamplingParams(max_tokens=None, stop="a", seed=3)
assert params.clone() == params and params.clone() is not params
""",
    "text prompts": LLM_
    + """
params = SamplingParams(temperature=0, max_tokens=4)
named = llm.generate([{"prompt": "ab"}, {"prompt": "c"}], params)
plain = llm.generate(["ab", "c"], params)
assert [each.outputs for each in named] == [each.outputs for each in plain]
assert llm.generate({"prompt": "ab"}, params)[0].outputs == plain[0].outputs
""",
    "token prompts": LLM_
    + """
params = SamplingParams(temperature=0, max_tokens=4)
outputs = llm.generate([{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}], params)
assert [each.prompt_token_ids for each in outputs] == [[5, 6], [7]]
assert llm.generate(prompts={"prompt_token_ids": [5, 6]}, sampling_params=params)[0].finished
""",
    "one set of parameters each": LLM_
    + """
several = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=3, seed=4)]
outputs = llm.generate(["a", "b"], several)
assert len(outputs[0].outputs[0].token_ids) == 2
""",
    "max_tokens None": LLM_
    + """
output = llm.generate("a" * 100, SamplingParams(max_tokens=None, ignore_eos=True))[0]
assert output.outputs[0].finish_reason == "length"
assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 128
""",
    "log-probabilities": LLM_
    + """
output = llm.generate("ab", SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=3))[0]
completion = output.outputs[0]
own = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids)]
assert abs(completion.cumulative_logprob - sum(own)) < 1e-9
assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 2
assert llm.generate("ab")[0].outputs[0].cumulative_logprob is None
""",
    "log-probabilities of the whole vocabulary": LLM_
    + """
import math
output = llm.generate("ab", SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=2))[0]
for row in [*output.outputs[0].logprobs, output.prompt_logprobs[1]]:
    assert abs(sum(math.exp(each.logprob) for each in row.values()) - 1) < 1e-5
    assert len(row) == llm.vocab_size
""",
    "stop strings": LLM_
    + """
greedy = dict(temperature=0, max_tokens=12, ignore_eos=True)
text = llm.generate("ab", SamplingParams(**greedy))[0].outputs[0].text
stop = text[4:6]
end = text.index(stop)
short = llm.generate("ab", SamplingParams(stop=[stop], **greedy))[0].outputs[0]
kept = llm.generate("ab", SamplingParams(stop=stop, include_stop_str_in_output=True, **greedy))[0]
assert (short.text, short.stop_reason, short.finish_reason) == (text[:end], stop, "stop")
assert kept.outputs[0].text == text[:end] + stop
""",
    "stop tokens": LLM_
    + """
greedy = dict(temperature=0, max_tokens=12, ignore_eos=True)
tokens = llm.generate("ab", SamplingParams(**greedy))[0].outputs[0].token_ids
stopped = llm.generate("ab", SamplingParams(stop_token_ids=[tokens[3]], **greedy))[0].outputs[0]
assert stopped.stop_reason == tokens[3] and stopped.finish_reason == "stop"
assert stopped.token_ids == tokens[: stopped.token_ids.index(tokens[3]) + 1]
assert stopped.text == llm.tokenizer.decode(stopped.token_ids[:-1])
kept = SamplingParams(stop_token_ids=[tokens[3]], include_stop_str_in_output=True, **greedy)
assert llm.generate("ab", kept)[0].outputs[0].text == llm.tokenizer.decode(stopped.token_ids)
assert llm.generate("ab", SamplingParams(**greedy))[0].outputs[0].stop_reason is None
""",
    "special tokens": LLM_
    + """
params = dict(allowed_token_ids=[0], max_tokens=3)
assert llm.generate("ab", SamplingParams(**params))[0].outputs[0].text == ""
shown = llm.generate("ab", SamplingParams(skip_special_tokens=False, **params))[0].outputs[0]
assert shown.text == "<pad><pad><pad>"
end = dict(allowed_token_ids=[llm.tokenizer.eos_token_id], skip_special_tokens=False)
assert llm.generate("ab", SamplingParams(**end))[0].outputs[0].text == ""
kept = SamplingParams(include_stop_str_in_output=True, **end)
assert llm.generate("ab", kept)[0].outputs[0].text == llm.tokenizer.eos_token
""",
    "classes of tokens": LLM_
    + """
ids = [llm.tokenizer.convert_tokens_to_ids(each) for each in ("y", "n")]
output = llm.generate("Is it?", SamplingParams(allowed_token_ids=ids, max_tokens=1))[0]
assert output.outputs[0].text in ("y", "n")
""",
    "bad words": LLM_
    + """
greedy = dict(temperature=0, max_tokens=12, ignore_eos=True)
text = llm.generate("ab", SamplingParams(**greedy))[0].outputs[0].text
word = next(text[at : at + 2] for at in range(3, 9) if " " not in text[at : at + 2])
assert word not in llm.generate("ab", SamplingParams(bad_words=[word], **greedy))[0].outputs[0].text
""",
    "n completions": LLM_
    + """
output = llm.generate("ab", SamplingParams(n=3, temperature=1.0, max_tokens=3))[0]
assert [each.index for each in output.outputs] == [0, 1, 2]
""",
    "prefix caching": START
    + """
llm = LLM(model=MODEL, enable_prefix_caching=True, max_model_len=128, block_size=8)
params = SamplingParams(temperature=0, max_tokens=4)
first = llm.generate("a" * 50 + "b", params)[0]
again = llm.generate("a" * 50 + "c", params)[0]
assert first.num_cached_tokens == 0 and again.num_cached_tokens == 48
""",
    "structured choice": LLM_
    + """
from vllm import StructuredOutputsParams
choice = StructuredOutputsParams(choice=["Positive", "Negative"])
output = llm.generate("Nice!", SamplingParams(structured_outputs=choice))[0]
assert output.outputs[0].text in ("Positive", "Negative")
""",
    "structured regex without a word": LLM_
    + """
from vllm import StructuredOutputsParams
regex = StructuredOutputsParams(regex="[a-c]{4}")
output = llm.generate("x", SamplingParams(structured_outputs=regex, bad_words=["a", "b"]))[0]
assert output.outputs[0].text == "cccc"
""",
    "n-grams": START
    + """
llm = LLM(model=MODEL, speculation="ngram", num_speculative_tokens=3, max_model_len=128)
assert llm.generate("abcabcabc", SamplingParams(temperature=0))[0].finished
""",
    "an engine by steps": """
from vllm import LLMEngine, SamplingParams
engine = LLMEngine(model=MODEL, max_model_len=128)
for number in range(3):
    engine.add_request("ab", SamplingParams(max_tokens=4), request_id=str(number))
done = set()
while engine.has_unfinished_requests():
    done |= {output.request_id for output in engine.step() if output.finished}
assert done == {"0", "1", "2"}
""",
}
REFUSED: dict[str, tuple[str, type[Exception], str]] = {
    "custom code": (START + "LLM(MODEL, trust_remote_code=True)", InputError, "never run"),
    "adapters": (START + "LLM(MODEL, enable_lora=True)", InputError, "merge the adapter"),
    "several GPUs": (START + "LLM(MODEL, tensor_parallel_size=2)", InputError, "m5_kernels"),
    "few bits": (START + 'LLM(MODEL, quantization="awq")', InputError, "m5_kernels has"),
    "guesses": (
        START + 'LLM(MODEL, speculative_config={"method": "ngram"})',
        InputError,
        'speculation="ngram"',
    ),
    "a name near to none": (START + "LLM(MODEL, hf_config_path='x')", InputError, "it has max_num"),
    "a name near to one": (
        START + "LLM(MODEL, max_model_length=9)",
        InputError,
        "mean 'max_model_len'",
    ),
    "logits processors": (
        START + "SamplingParams(logits_processors=[print])",
        InputError,
        "logit_bias",
    ),
    "a sampling name near to one": (START + "SamplingParams(top_q=1)", InputError, "mean 'top_"),
    "images": (
        LLM_ + 'llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}})',
        InputError,
        "'multi_modal_data'.*text alone",
    ),
    "an adapter": (LLM_ + "llm.generate('a', lora_request=1)", InputError, "merge the adapter"),
    "a template": (LLM_ + "llm.chat([], chat_template='x')", InputError, "engine.tokenizer"),
    "half an answer": (
        LLM_ + "llm.chat([], continue_final_message=True)",
        InputError,
        "chat has no argument 'continue_final_message'",
    ),
    "no prompt for an answer": (
        LLM_ + "llm.chat([], add_generation_prompt=False)",
        InputError,
        "next answer",
    ),
    "an argument of no method": (LLM_ + "llm.generate('a', progress=1)", InputError, "it has prom"),
    "params": (LLM_ + "llm.add_request('a', params=1)", InputError, "instead: sampling_params"),
    "pooling": (START + "LLM(MODEL, runner='pooling')", InputError, "models generate text"),
    "vLLM's metrics": (LLM_ + "llm.get_metrics()", AttributeError, "engine.stats"),
    "defaults of a model": (
        START + "LLM(MODEL, generation_config='auto')",
        InputError,
        "SamplingParams",
    ),
    "text of a log-probability": (
        LLM_
        + """
row = llm.generate("a", SamplingParams(logprobs=1))[0].outputs[0].logprobs[0]
[each.decoded_token for each in row.values()]
""",
        AttributeError,
        "engine.tokenizer.decode",
    ),
    "beam search": (LLM_ + "llm.beam_search(['a'], 2)", AttributeError, "n completions"),
    "embeddings": (LLM_ + "llm.embed('a')", AttributeError, "no embeddings"),
    "an asynchronous engine": ("from vllm import AsyncLLMEngine", ImportError, "`stream`.*serve"),
    "no allowed token": (START + "SamplingParams(allowed_token_ids=[])", InputError, "1 to 2"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_with_one_import_changed(name, folder):
    if "structured" in name:
        pytest.importorskip("llguidance", reason="llguidance is not installed")
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        run("m4_prefix_chunked", PROGRAMS[name], folder)
    assert ("Prompts" in shown.getvalue() and "2/2" in shown.getvalue()) == (name == "progress")


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_exist_is_refused_with_what_to_use_instead(name, folder):
    program, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        run("m4_prefix_chunked", program, folder)
    assert re.search(words, str(caught.value)), str(caught.value)


@every_milestone
def test_the_first_programs_run_on_every_milestone(package, folder):
    run(package.__name__, LLM_ + BASIC + CHAT, folder)
    assert package.LLM is package.LLMEngine
