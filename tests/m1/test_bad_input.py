"""Bad input is refused with the number and the limit, and no other request notices."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import m1_single
from engine_helpers import (
    PACKAGES,
    assert_empty,
    every_milestone,
    make_engine,
    random_prompts,
    run_to_end,
    tiny_model,
    word_tokenizer,
)
from m1_single import SamplingParams
from milestone_llm.core.errors import InputError
from milestone_llm.models.tiny_models import VOCAB_SIZE

BAD_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": []}, "0 tokens.* at least 1"),
    "token past the vocabulary": ({"prompt": [5, VOCAB_SIZE]}, "199.* ends at 198"),
    "negative token": ({"prompt": [5, -1]}, "token id -1.* ends at 198"),
    "prompt of max_model_len": ({"prompt": [5] * 32}, "32 tokens.*max_model_len=32.*at most 31"),
    "prompt of more than a step": (
        {"prompt": [5] * 25},
        "25 tokens.*max_num_batched_tokens=24",
    ),
    "fraction for a token": ({"prompt": [5, 1.5]}, r"list of token ids.*1\.5"),
    "nothing for a prompt": ({"prompt": None}, "list of token ids.*None"),
    "number for a prompt": ({"prompt": 5}, "list of token ids.*5"),
    "bytes for a prompt": ({"prompt": b"w5"}, "list of token ids.*b'w5'"),
    "one message for a list": ({"prompt": {"role": "user", "content": "Hi"}}, "list of messages"),
    "text without tokenizer": ({"prompt": "w5"}, "no tokenizer"),
    "chat without tokenizer": ({"prompt": [{"role": "user", "content": "Hi"}]}, "no tokenizer"),
    "stop token past the vocabulary": (
        {"params": {"stop_token_ids": [VOCAB_SIZE]}},
        "stop_token_ids.*199.*198",
    ),
    "stop string without tokenizer": ({"params": {"stop": "w5"}}, "needs a tokenizer"),
    "more logprobs than tokens": ({"params": {"logprobs": VOCAB_SIZE + 1}}, "200.*199"),
    "nothing left to sample": (
        {"params": {"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE))}},
        "min_tokens=1.*all 199",
    ),
    "several completions": ({"params": {"n": 2}}, "n=2"),
    "duplicate id": ({"request_id": "first"}, "'first'.*unfinished"),
    "number for an id": ({"request_id": 5}, "request_id must be a string.*5"),
    "empty id": ({"request_id": ""}, "request_id must be a string.*not empty"),
    "priority without order": ({"priority": "high"}, "priority.*whole number.*'high'"),
    "truth for a token": ({"prompt": [5, True]}, "list of token ids.*True"),
    "half a character for an id": ({"request_id": "r\ud800"}, "request_id is no valid text"),
    "truth for a priority": ({"priority": True}, "priority.*whole number.*True"),
}


def add(engine: Any, prompt: Any = (5, 6), params: Any = None, **options: Any) -> str:
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    return engine.add_request(prompt, SamplingParams(**(params or {})), **options)


def limits_of(package: Any) -> dict[str, int]:
    """A step smaller than a request may grow; from M3 on a step must hold a whole one."""
    return {"max_model_len": 32, "max_num_batched_tokens": 24 if package.__name__ < "m3" else 32}


def cases_of(package: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """What is bad input in this milestone: later ones can do more."""
    cases = dict(BAD_REQUESTS)
    if package.__name__ >= "m3":
        del cases["several completions"]
    if limits_of(package)["max_num_batched_tokens"] > 25:
        del cases["prompt of more than a step"]
    return cases


def serve_good_requests(package: Any, disturb: Any = lambda engine: None) -> dict[str, list[int]]:
    """Sampled requests without seeds of their own: one waits, two run when `disturb` is called.

    Their seeds come from the engine and their number, so that even a number lost would show.
    """
    engine = make_engine(package, max_num_seqs=2, **limits_of(package))
    prompts = random_prompts([7, 3, 9, 4])
    for name, prompt in zip(("first", "second", "third"), prompts, strict=False):
        add(engine, prompt, {"max_tokens": 6}, request_id=name)
    outputs: dict[str, Any] = {}
    for step in range(3):
        if step == 2:
            disturb(engine)
        outputs |= {output.request_id: output for output in engine.step()}
    add(engine, prompts[3], {"max_tokens": 6}, request_id="later")
    outputs |= run_to_end(engine)
    assert_empty(engine)
    assert len(outputs) == 4
    return {name: output.token_ids for name, output in outputs.items()}


@pytest.mark.parametrize(
    ("package", "case"),
    [
        pytest.param(package, case, id=f"{package.__name__}-{case}")
        for package in PACKAGES
        for case in cases_of(package)
    ],
)
def test_bad_request_is_refused_with_number_and_limit(package, case):
    request, message = BAD_REQUESTS[case]
    engine = make_engine(package, **limits_of(package))
    add(engine, request_id="first")
    before = engine.stats()
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        add(engine, **request)
    assert engine.stats() == before


@every_milestone
def test_bad_requests_mid_flight_change_no_token_of_the_others(package):
    def disturb(engine: Any) -> None:
        for request, message in cases_of(package).values():
            with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
                add(engine, **request)

    assert serve_good_requests(package, disturb) == serve_good_requests(package)


@every_milestone
def test_one_bad_prompt_in_a_list_queues_none_of_them(package):
    def disturb(engine: Any) -> None:
        before = engine.stats()
        for serve in (engine.generate, engine.stream):
            for bad in ([], [5] * 32, [5, 1.5], None):
                with pytest.raises(ValueError, match="prompt"):
                    serve([[5, 6], [7], bad])
        assert engine.stats() == before

    assert serve_good_requests(package, disturb) == serve_good_requests(package)


@every_milestone
def test_numbers_of_prompts_and_params_must_agree(package):
    engine = make_engine(package)
    with pytest.raises(ValueError, match="3 prompts, but 2 sampling_params"):
        engine.generate([[5], [6], [7]], [SamplingParams()] * 2)
    for nothing in ([], {}):
        with pytest.raises(ValueError, match="must be SamplingParams, got"):
            engine.add_request([5], nothing)
    assert_empty(engine)


@every_milestone
def test_parameters_of_another_kind_are_refused(package: Any) -> None:
    engine = make_engine(package)
    with pytest.raises(ValueError, match=r"must be SamplingParams, got \{'temperature': 0\}"):
        engine.add_request([5, 6], {"temperature": 0})
    for bad in (0, {"temperature": 0}, SamplingParams):
        with pytest.raises(
            ValueError, match=rf"must be SamplingParams, got {re.escape(repr(bad))}"
        ):
            engine.generate([[5, 6]], bad)
    assert_empty(engine)


MESSAGE = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "prompts",
    [None, 5, {"role": "user"}, [[5], None], [[[5]]], [[MESSAGE, "Hi"]], torch.tensor(3)],
    ids=repr,
)
def test_what_is_no_prompt_is_told_what_a_prompt_is(prompts):
    engine = make_engine(m1_single)
    with pytest.raises(InputError, match="a prompt is text, a list of token ids"):
        engine.generate(prompts)


def test_what_is_no_string_is_the_id_of_no_request():
    engine = make_engine(m1_single)
    for ask in (engine.abort, engine.is_taken):
        with pytest.raises(InputError, match=r"request_id must be a string.*\[\]"):
            ask([])


def test_text_that_is_none_is_refused_with_the_place():
    engine = make_engine(m1_single, tokenizer=word_tokenizer())
    with pytest.raises(ValueError, match="no valid text: character 3 is half of a pair"):
        engine.add_request("w5 \ud800 w6")


def test_text_of_no_tokens_is_an_empty_prompt():
    engine = make_engine(m1_single, tokenizer=word_tokenizer())
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.add_request("  ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 2e6),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", 2.01),
        ("frequency_penalty", None),
        ("presence_penalty", -2.01),
        ("presence_penalty", math.nan),
        ("presence_penalty", True),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("logit_bias", [5]),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", None),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", ["fine", 5]),
        ("stop", ["a"] * 65),
        ("stop", "a" * 257),
        ("stop", 5),
        ("stop_token_ids", ["w5"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [5] * 1025),
        ("stop_token_ids", "w5"),
        ("ignore_eos", None),
        ("cache_salt", None),
        ("logprobs", -1),
        ("logprobs", 1.5),
        ("n", 0),
    ],
)
def test_sampling_parameter_out_of_range_is_refused_with_its_value(name, value):
    with pytest.raises(
        ValueError, match=rf"{name} must be .*got .*{re.escape(repr(value)[:200])[-8:]}"
    ):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"top_k": -1, "top_p": 1, "min_p": 1.0},
        {"seed": 2**63 - 1, "min_tokens": 16, "logprobs": 0},
        {"seed": -(2**63), "stop": ["a" * 256] * 64, "stop_token_ids": [5] * 1024},
        {"stop": "one"},
        {"stop": None, "stop_token_ids": None, "logit_bias": None},
        {"frequency_penalty": -2, "presence_penalty": 2.0, "logit_bias": {0: -100, 5: 100}},
        {"temperature": 1e6, "top_k": 2**40, "top_p": 1e-300},
    ],
)
def test_sampling_parameters_at_the_limit_are_taken(params):
    SamplingParams(**params)


def test_biases_that_are_changed_later_are_not_those_of_the_request():
    biases = {5: 1.0}
    params = SamplingParams(logit_bias=biases)
    biases[5] = math.nan
    assert params.logit_bias == {5: 1.0}


def test_lists_of_sampling_parameters_do_not_change_after_they_were_checked():
    stop, stop_token_ids = ["w5"], [5]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids)
    stop.append(5)
    stop_token_ids.append("x")
    assert params == SamplingParams(stop="w5", stop_token_ids={5})
    for owned in (params.stop, params.stop_token_ids, SamplingParams().stop):
        with pytest.raises(AttributeError):
            owned.append(5)


@every_milestone
def test_min_tokens_beyond_all_that_there_is_room_for_means_no_stop(package):
    engine = make_engine(package, max_model_len=16)
    never = {"stop_token_ids": list(range(0, VOCAB_SIZE, 13)), "temperature": 0}
    expected = engine.generate([[5]], SamplingParams(max_tokens=99, min_tokens=99, **never))
    for many in (2**31, 2**32, 10**30):
        params = SamplingParams(max_tokens=many, min_tokens=many, **never)
        assert engine.generate([[5]], params)[0].token_ids == expected[0].token_ids


@every_milestone
def test_a_step_budget_beyond_all_requests_takes_no_memory(package):
    engine = make_engine(package, max_model_len=16, max_num_batched_tokens=10**30)
    assert len(engine.generate([[5] * 9] * 5, SamplingParams(max_tokens=2, ignore_eos=True))) == 5


@every_milestone
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seq": 4}, "'max_num_seq'.*did you mean 'max_num_seqs'"),
        ({"max_model_length": 4}, "did you mean 'max_model_len'"),
        ({"zzz": 1}, "'zzz'.*it has .*max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_model_len": -5}, "max_model_len must be at least 2, got -5 .*one of output"),
        ({"max_model_len": 1025}, "max_model_len is 1025.*only 1024"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be of type int, got True"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be of type int, got '4'"),
        ({"max_model_len": 8.5}, "max_model_len must be .*int.*, got 8.5"),
        ({"check_invariants": 1}, "check_invariants must be of type bool, got 1"),
        ({"trace": "nowhere"}, "trace must be .*'nowhere'"),
        ({"dtype": "float7"}, "dtype.*'float7'"),
        ({"device": "mps"}, "on a CPU or on CUDA.* not on mps"),
        ({"scheduler": "\0"}, "cannot read"),
        ({"scheduler": "\ud800.py"}, "cannot read"),
        ({"trace": "\0.jsonl"}, "cannot write"),
    ],
)
def test_bad_configuration_is_refused_at_construction(package, fields, message):
    with pytest.raises(InputError, match=message):
        package.LLMEngine(tiny_model(), **fields)
