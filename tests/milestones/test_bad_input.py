"""Bad input is refused with the number and the limit, and no other request notices."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import m1_single
from helpers.engines import (
    assert_empty,
    every_milestone,
    make_engine,
    random_prompts,
    run_to_end,
    word_tokenizer,
)
from m1_single import SamplingParams
from milestone_llm.core.errors import InputError
from milestone_llm.models.tiny_models import VOCAB_SIZE

MESSAGE = {"role": "user", "content": "Hi"}
NO_PROMPTS = [None, 5, b"w5", [5, 1.5], [5, True], MESSAGE, [MESSAGE, "Hi"], torch.tensor(3)]
BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("0 tokens.* at least 1", {"prompt": []}),
    ("199.* ends at 198", {"prompt": [5, VOCAB_SIZE]}),
    ("token id -1.* ends at 198", {"prompt": [5, -1]}),
    ("32 tokens.*max_model_len=32.*at most 31", {"prompt": [5] * 32}),
    *(("a prompt is text, a list of token ids", {"prompt": bad}) for bad in NO_PROMPTS),
    *(("no tokenizer", {"prompt": text}) for text in ("w5", [MESSAGE])),
    ("must be SamplingParams, got", {"sampling_params": {"temperature": 0}}),
    ("stop_token_ids.*199.*198", {"params": {"stop_token_ids": [VOCAB_SIZE]}}),
    ("needs a tokenizer", {"params": {"stop": "w5"}}),
    ("200.*199", {"params": {"logprobs": VOCAB_SIZE + 1}}),
    ("prompt_logprobs=1000 exceeds", {"params": {"prompt_logprobs": 1000}}),
    ("min_tokens=1.*all 199", {"params": {"min_tokens": 1, "stop_token_ids": [*range(199)]}}),
    ("'first'.*unfinished", {"request_id": "first"}),
    *(("request_id must be a string", {"request_id": bad}) for bad in (5, "")),
    ("request_id is no valid text", {"request_id": "r\ud800"}),
    *(("priority.*whole number", {"priority": bad}) for bad in ("high", True)),
]
"""What is said, and what was asked for."""
OF_FIRST_MILESTONES: list[tuple[str, dict[str, Any]]] = [
    ("n=2", {"params": {"n": 2}}),
    ("25 tokens.*max_num_batched_tokens=24", {"prompt": [5] * 25}),
]
"""From M3 on several completions are served, and a step must hold a whole request."""


def add(engine: Any, prompt: Any = (5, 6), params: Any = None, **options: Any) -> str:
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    options = {"sampling_params": SamplingParams(**(params or {})), **options}
    return engine.add_request(prompt, **options)


def serve_good_requests(package: Any, disturb: Any = lambda engine: None) -> dict[str, list[int]]:
    """Sampled requests without seeds of their own: one waits, two run when `disturb` is called.

    Their seeds come from the engine and their number, so that even a number lost would show.
    """
    budget = 24 if package.__name__ < "m3" else 32
    limits = {"max_model_len": 32, "max_num_batched_tokens": budget}
    engine = make_engine(package, max_num_seqs=2, **limits)
    prompts = random_prompts([7, 3, 9, 4])
    for name, prompt in zip(("first", "second", "third"), prompts, strict=False):
        add(engine, prompt, {"max_tokens": 6}, request_id=name)
    outputs: dict[str, Any] = {}
    for step in range(3):
        if step == 2:
            before = engine.stats()
            disturb(engine)
            assert engine.stats() == before
        outputs |= {output.request_id: output for output in engine.step()}
    add(engine, prompts[3], {"max_tokens": 6}, request_id="later")
    outputs |= run_to_end(engine)
    assert_empty(engine)
    assert len(outputs) == 4
    return {name: output.token_ids for name, output in outputs.items()}


@every_milestone
def test_bad_requests_are_refused_and_change_no_token_of_the_others(package):
    more = OF_FIRST_MILESTONES if package.__name__ < "m3" else []

    def disturb(engine: Any) -> None:
        for message, request in [*BAD_REQUESTS, *more]:
            with pytest.raises(InputError, match=re.compile(message, re.DOTALL)):
                add(engine, **request)
        for serve in (engine.generate, engine.stream):  # one bad prompt, and none is queued
            for bad in ([], [5] * 32, None):
                with pytest.raises(InputError, match="prompt"):
                    serve([[5, 6], [7], bad])
            with pytest.raises(InputError, match="n=9"):
                serve([[5, 6], [7]], [SamplingParams(), SamplingParams(n=9)])

    assert serve_good_requests(package, disturb) == serve_good_requests(package)


def test_what_is_given_to_generate_and_abort_is_looked_at():
    engine = make_engine(m1_single, tokenizer=word_tokenizer())
    with pytest.raises(InputError, match="3 prompts, but 2 sampling_params"):
        engine.generate([[5], [6], [7]], [SamplingParams()] * 2)
    for prompts in (None, torch.tensor(3), {"role": "user"}, [[[5]]]):
        with pytest.raises(InputError, match="a prompt is text, a list of token ids"):
            engine.generate(prompts)
    with pytest.raises(InputError, match="no valid text: character 3 is half of a pair"):
        engine.generate("w5 \ud800 w6")
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.generate("  ")
    for ask in (engine.abort, engine.is_taken):
        with pytest.raises(InputError, match="request_id must be a string"):
            ask([])
    assert_empty(engine)


BAD_PARAMETERS: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, "hot", True, 2e6],
    "top_k": [-2, 1.5],
    "top_p": [0.0, 1.01, math.nan],
    "min_p": [-0.01, 1.01],
    "repetition_penalty": [0.0, math.inf],
    "frequency_penalty": [2.01, None],
    "presence_penalty": [-2.01],
    "logit_bias": [{5: math.nan}, {5: 100.5}, {"5": 1.0}, dict.fromkeys(range(1025), 1.0), [5]],
    "seed": [-(2**63) - 1, 2**63, 0.5],
    "max_tokens": [0, 1.5],
    "min_tokens": [-1, 17],
    "stop": [[""], ["fine", 5], ["a"] * 65, "a" * 257, 5],
    "stop_token_ids": [["w5"], [True], [5] * 1025, "w5"],
    "ignore_eos": [None],
    "cache_salt": [None],
    "logprobs": [-2, 1.5],
    "bad_words": ["a", [""], [" "]],
    "allowed_token_ids": [[], [1.5], 5],
    "skip_special_tokens": [None, 1],
    "include_stop_str_in_output": [None],
    "prompt_logprobs": [-2],
    "n": [0],
}
AT_THE_LIMIT: list[dict[str, Any]] = [
    {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 1.0, "min_tokens": 16, "logprobs": 0},
    {"temperature": 1e6, "top_k": 2**40, "top_p": 1e-300, "seed": 2**63 - 1},
    {"seed": -(2**63), "stop": ["a" * 256] * 64, "stop_token_ids": [5] * 1024},
    {"stop": None, "stop_token_ids": None, "logit_bias": None},
    {"frequency_penalty": -2, "presence_penalty": 2.0, "logit_bias": {0: -100, 5: 100}},
]


def test_a_sampling_parameter_out_of_range_is_refused_and_one_at_the_limit_taken():
    for name, values in BAD_PARAMETERS.items():
        for value in values:
            with pytest.raises(InputError, match=f"{name} must be .*got "):
                SamplingParams(**{name: value})
    for params in AT_THE_LIMIT:
        SamplingParams(**params)


def test_what_was_checked_does_not_change_with_the_lists_it_came_from():
    stop, stop_token_ids, biases = ["w5"], [5], {5: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, logit_bias=biases)
    stop.append(5)
    stop_token_ids.append("x")
    biases[5] = math.nan
    assert params == SamplingParams(stop="w5", stop_token_ids={5}, logit_bias={5: 1.0})


@every_milestone
def test_numbers_beyond_all_that_there_is_room_for_mean_all_and_take_no_memory(package):
    engine = make_engine(package, max_model_len=16, max_num_batched_tokens=10**30)
    never = {"stop_token_ids": list(range(0, VOCAB_SIZE, 13)), "temperature": 0}
    for many in (99, 2**31, 10**30):
        params = SamplingParams(max_tokens=many, min_tokens=many, **never)
        assert len(engine.generate([[5]], params)[0].token_ids) == 15
