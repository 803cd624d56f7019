"""A request gets the tokens it gets alone, whoever runs beside it, comes late, or is aborted."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

import m1_single
from engine_helpers import (
    assert_empty,
    every_milestone,
    hf_generate,
    hf_greedy,
    make_engine,
    random_prompts,
    tiny_model,
)
from m1_single import SamplingParams

PROMPTS = random_prompts([1, 30, 7, 24, 3, 18], seed=6)
"""Shorter and longer than the sliding window of tiny mistral (24), and growing past it."""
MAX_TOKENS = 6
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    {
        "temperature": 0,
        "logit_bias": {token: (token % 7 - 3) / 2 for token in range(0, 192, 12)},
        "repetition_penalty": 0.7,
        "frequency_penalty": 1.2,
        "presence_penalty": -1.7,
    },
    {
        "temperature": 1.0,
        "logit_bias": {token: token % 5 - 2 for token in range(40)},  # more than M5's device knows
        "frequency_penalty": -1.4,
        "presence_penalty": 0.6,
    },
]


@dataclass(frozen=True)
class Work:
    """A request, when it comes and when, if ever, it is aborted (in engine steps)."""

    prompt: int
    sampled: int = 0
    seed: int = 0
    max_tokens: int = MAX_TOKENS
    priority: int = 0
    arrival: int = 0
    abort: int | None = None

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            **SAMPLED[self.sampled], seed=self.seed, max_tokens=max_tokens, ignore_eos=True
        )


@functools.cache
def alone(family: str, prompt: int, sampled: int, seed: int) -> list[int]:
    """The tokens of a request that has an M1 engine for itself."""
    params = Work(prompt, sampled, seed).params(MAX_TOKENS)
    (output,) = make_engine(m1_single, tiny_model(family)).generate(PROMPTS[prompt], params)
    return output.token_ids


def serve(engine: Any, works: list[Work]) -> dict[str, Any]:
    """Last output of each request that had one; `q3` is the fourth."""
    outputs: dict[str, Any] = {}
    step = 0
    while step <= max(work.arrival for work in works) or engine.has_unfinished_requests():
        for number, work in enumerate(works):
            if work.arrival == step:
                params = work.params(work.max_tokens)
                name = f"q{number}"
                engine.add_request(PROMPTS[work.prompt], params, name, work.priority)
        for number, work in enumerate(works):
            if work.abort == step and (output := engine.abort(f"q{number}")):
                outputs[f"q{number}"] = output
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
    return outputs


def assert_each_as_alone(family: str, works: list[Work], outputs: dict[str, Any]) -> None:
    assert len(outputs) == len(works)
    for number, work in enumerate(works):
        output = outputs[f"q{number}"]
        expected = alone(family, work.prompt, work.sampled, work.seed)[: work.max_tokens]
        if output.finish_reason == "abort":
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.finish_reason == "length"
            assert output.token_ids == expected


works = st.lists(
    st.builds(
        Work,
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampled=st.integers(0, len(SAMPLED) - 1),
        seed=st.integers(0, 1),
        max_tokens=st.integers(1, MAX_TOKENS),
        priority=st.integers(-1, 1),
        arrival=st.integers(0, 8),
        abort=st.none() | st.none() | st.integers(0, 12),
    ),
    min_size=2,
    max_size=6,
)


@every_milestone
@settings(max_examples=8)
@given(
    works=works,
    family=st.sampled_from(["llama", "mistral"]),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.sampled_from([36, 61, 2048]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
@example(  # a region is freed by an abort and taken by a longer request while others decode
    works=[Work(1), Work(2, 1), Work(3, 2, abort=2), Work(5, 3, arrival=2), Work(0, arrival=3)],
    family="mistral",
    max_num_seqs=3,
    max_num_batched_tokens=61,
    policy="fcfs",
)
def test_each_request_equals_itself_run_alone(
    package, works, family, max_num_seqs, max_num_batched_tokens, policy
):
    fields = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": 36,
    }
    if package is not m1_single:
        fields["policy"] = policy
    engine = make_engine(package, tiny_model(family), **fields)
    assert_each_as_alone(family, works, serve(engine, works))
    assert_empty(engine)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_alone_and_greedy_is_what_hugging_face_gives(family):
    """Without this, all engines might agree on the wrong tokens."""
    for prompt in range(len(PROMPTS)):
        assert alone(family, prompt, 0, 0) == hf_greedy(family, PROMPTS[prompt], MAX_TOKENS)


@pytest.mark.parametrize("prompt", [2, 3])
def test_what_counts_tokens_is_what_a_few_lines_make_of_hugging_faces_logits(prompt):
    params = SAMPLED[4]

    def counted(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = token_ids[0, len(PROMPTS[prompt]) :].tolist()
        for token in set(output):
            scores[0, token] -= params["frequency_penalty"] * output.count(token)
            scores[0, token] -= params["presence_penalty"]
        return scores

    expected = hf_generate(
        tiny_model("llama"),
        PROMPTS[prompt],
        MAX_TOKENS,
        sequence_bias=[[[token], float(bias)] for token, bias in params["logit_bias"].items()],
        repetition_penalty=params["repetition_penalty"],
        logits_processor=LogitsProcessorList([counted]),
    )
    assert len(set(expected)) < MAX_TOKENS  # one came twice
    assert alone("llama", prompt, 4, 0) == expected


def test_seeds_and_parameters_make_a_difference():
    """Without this, a sampler that ignored them would pass."""
    choices = itertools.product(range(len(SAMPLED)), (0, 1))
    outputs = {tuple(alone("llama", 2, sampled, seed)) for sampled, seed in choices}
    assert len(outputs) >= 6, "greedy is one whatever the seed"
    assert alone("llama", 2, 0, 0) == alone("llama", 2, 0, 1)
