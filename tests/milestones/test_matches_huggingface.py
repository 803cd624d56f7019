"""A request gets the tokens that it gets alone, and alone it gets Hugging Face's.

Whoever runs beside it, comes late or is aborted; wherever its KV lies, is shared, found, moved or
computed again; in whatever chunks. Every workload is served twice: M4 finds nearly all then.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
import m5_kernels
from helpers.engines import (
    PACKAGES,
    assert_empty,
    every_milestone,
    greedy,
    hf_generate,
    hf_generate_once,
    hf_greedy,
    make_engine,
    random_prompts,
    tiny_model,
)
from m1_single import SamplingParams
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.models.tiny_models import TINY_FAMILIES

SYSTEM, TAIL, OTHER = random_prompts([32, 11, 27], seed=5)
PROMPTS = [
    SYSTEM,  # whole blocks, and longer than the window of mistral and gemma3, which is 24
    SYSTEM + TAIL,
    SYSTEM[:24] + TAIL[:3],
    SYSTEM[:16],
    OTHER,
    [0],  # pad, BOS and EOS are ordinary tokens inside a prompt
    [1, 2, *OTHER[:15], 0],  # grows out of the window while decoding
]
MAX_TOKENS = 8
MAX_MODEL_LEN = 51  # no more than the longest needs: pools for one request are then small
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
    n: int = 1
    priority: int = 0
    arrival: int = 0
    abort: int | None = None

    def params(self, n: int = 1) -> SamplingParams:
        return SamplingParams(
            **SAMPLED[self.sampled],
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            n=n,
        )


@functools.cache
def m1_engine(family: str) -> Any:
    return make_engine(m1_single, tiny_model(family))


@functools.cache
def alone(family: str, prompt: int, sampled: int, seed: int) -> list[int]:
    """The tokens of a request that has an M1 engine for itself."""
    params = Work(prompt, sampled, seed).params()
    (output,) = m1_engine(family).generate(PROMPTS[prompt], params)
    return output.token_ids


def engine_of(package: Any, family: str, limits: dict[str, Any]) -> Any:
    """An engine with those limits that its milestone has, such that they go together."""
    names = package.EngineConfig.__dataclass_fields__
    fields = {name: value for name, value in limits.items() if name in names}
    if not fields.get("enable_chunked_prefill", False):  # a step holds any prompt
        fields["max_num_batched_tokens"] = max(MAX_MODEL_LEN, limits["max_num_batched_tokens"])
        fields.pop("long_prefill_token_threshold", None)
    if package is m1_single:  # where padding counts: several rows, whatever their lengths
        fields["max_num_batched_tokens"] = 4 * MAX_MODEL_LEN
    if block_size := fields.get("block_size"):
        num_blocks = -(-(MAX_MODEL_LEN + limits["spare_tokens"]) // block_size)
        fields["kv_cache_tokens"] = num_blocks * block_size
    return make_engine(package, tiny_model(family), max_model_len=MAX_MODEL_LEN, **fields)


def serve(engine: Any, works: list[Work], can_fork: bool) -> dict[str, Any]:
    """Last output of each request that had one; `q3` is the fourth."""
    outputs: dict[str, Any] = {}
    step = 0
    while step <= max(work.arrival for work in works) or engine.has_unfinished_requests():
        for number, work in enumerate(works):
            if work.arrival == step:
                params = work.params(work.n if can_fork else 1)
                engine.add_request(PROMPTS[work.prompt], params, f"q{number}", work.priority)
        for number, work in enumerate(works):
            if work.abort == step and (output := engine.abort(f"q{number}")):
                outputs[f"q{number}"] = output
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
    return outputs


def assert_each_as_alone(family: str, works: list[Work], outputs: dict[str, Any]) -> None:
    assert len(outputs) == len(works)
    for number, work in enumerate(works):
        for each in outputs[f"q{number}"].outputs:
            right = alone(family, work.prompt, work.sampled, work.seed + each.index)
            right = right[: work.max_tokens]
            if each.finish_reason == "abort":
                assert each.token_ids == right[: len(each.token_ids)]
            else:
                assert (each.token_ids, each.finish_reason) == (right, "length")


works = st.lists(
    st.builds(
        Work,
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampled=st.integers(0, len(SAMPLED) - 1),
        seed=st.integers(0, 1),
        max_tokens=st.integers(1, MAX_TOKENS),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        arrival=st.integers(0, 8),
        abort=st.none() | st.none() | st.integers(0, 12),
    ),
    min_size=2,
    max_size=5,
)
limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(3, 4),
        "max_num_batched_tokens": st.sampled_from([3, 7, 16, 33, 61, 500]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "block_size": st.sampled_from([1, 3, 4, 8, 16]),
        "spare_tokens": st.sampled_from([0, 0, 16, 64, 200]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "swap_space_tokens": st.sampled_from([None, 0, 24]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "prefill_policy": st.sampled_from(["mixed", "prefill_first"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 4, 16]),
    }
)
TIGHT = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 7,
    "policy": "fcfs",
    "block_size": 4,
    "spare_tokens": 0,
    "preemption": "recompute",
    "enable_chunked_prefill": True,
}
CASES = [(each, name) for each in PACKAGES[:4] for name in TINY_FAMILIES]
CASES += [(m5_kernels, name) for name in ("llama", "mistral")]


# Memory is freed by an abort and taken by a longer request while others decode.
SWAPPED = [
    Work(0, n=3),
    Work(6, 1, n=2),
    Work(1, 2, abort=2),
    Work(2, 3, arrival=2),
    Work(3, 4, n=3, arrival=3),
]


@pytest.mark.parametrize(
    ("package", "family"), CASES, ids=[f"{each.__name__}-{name}" for each, name in CASES]
)
def test_each_request_equals_itself_run_alone(package, family):
    assert_served_as_alone(package, family, [Work(n) for n in range(len(PROMPTS))], TIGHT)
    wider = {**TIGHT, "max_num_seqs": 3, "spare_tokens": 16, "preemption": "swap"}
    assert_served_as_alone(package, family, SWAPPED, wider)


@every_milestone
@settings(max_examples=10)
@given(family=st.sampled_from(list(TINY_FAMILIES)), works=works, limits=limits)
def test_random_requests_equal_themselves_run_alone(package, family, works, limits):
    assert_served_as_alone(package, family, works, limits)


def assert_served_as_alone(
    package: Any, family: str, works: list[Work], limits: dict[str, Any]
) -> None:
    engine = engine_of(package, family, limits)
    can_fork = package.__name__ >= "m3"
    for _ in range(2 if package.__name__ >= "m4" else 1):
        assert_each_as_alone(family, works, serve(engine, works, can_fork))
        assert_empty(engine)
        if can_fork:
            assert engine.scheduler.kv.preempter.host.pool.num_used == 0


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_alone_and_greedy_is_what_hugging_face_gives(family):
    """Without this, all engines might agree on the wrong tokens."""
    for prompt in range(len(PROMPTS)):
        assert alone(family, prompt, 0, 0) == hf_greedy(family, PROMPTS[prompt], MAX_TOKENS)


@pytest.mark.parametrize("prompt", [3, 4])
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


of_m2_to_m4 = pytest.mark.parametrize(
    ("package", "fields"),
    [
        (m2_batching, {"max_num_seqs": 1}),
        (m3_paged, {"block_size": 7}),
        (m4_prefix_chunked, {"block_size": 7, "max_num_batched_tokens": 9}),
    ],
    ids=["m2", "m3", "m4"],
)


@of_m2_to_m4
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_the_last_position_of_the_model_is_used(package, fields, family):
    """By a lone request in memory for just that."""
    model = tiny_model(family, max_position_embeddings=32)
    if package is not m2_batching:
        fields = {**fields, "kv_cache_tokens": 35}
    (output,) = make_engine(package, model, **fields).generate(OTHER[:20], greedy(16))
    assert (len(output.token_ids), output.finish_reason) == (12, "length")
    assert output.token_ids == hf_generate(model, OTHER[:20], 12, eos_token_id=199)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_finished_rows_may_drag_on_past_the_last_position_of_the_model(family):
    """In a static batch. The padding row's position must not grow past what the model has."""
    model = tiny_model(family, max_position_embeddings=32)
    long, short = SYSTEM[:30], OTHER[:3]
    full, other = make_engine(m1_single, model).generate([long, short], greedy(12))
    assert (len(full.token_ids), full.finish_reason) == (2, "length")
    assert other.token_ids == hf_generate(model, short, 12, eos_token_id=199)


@pytest.mark.parametrize(
    ("package", "fields", "n"),
    [
        (m1_single, {}, 1),
        (m2_batching, {}, 1),
        (m3_paged, {"max_model_len": 48, "kv_cache_tokens": 48}, 2),  # one has to go
        (m4_prefix_chunked, {"max_num_batched_tokens": 24}, 2),
    ],
    ids=["m1", "m2", "m3", "m4"],
)
def test_smollm2_names_the_capital_of_france_as_generate_does(
    package, fields, n, smollm2: LoadedModel
):
    engine = package.LLMEngine(
        smollm2.model,
        tokenizer=smollm2.tokenizer,
        check_invariants=True,
        **{"max_num_seqs": 2, "max_model_len": 64, **fields},
    )
    params = SamplingParams(temperature=0, max_tokens=10, n=n)
    for _ in range(2 if package is m4_prefix_chunked else 1):
        (output,) = engine.generate("What is the capital of France?", params, chat=True)
        expected = hf_generate_once(smollm2.model, tuple(output.prompt_token_ids), 10)
        assert [each.token_ids for each in output.outputs] == [expected] * n
        assert "Paris" in output.text
        assert "<|im_end|>" not in output.text
    if package is m3_paged:
        assert engine.stats()["preemptions"] == 1
    if package is m4_prefix_chunked:
        num_whole = len(output.prompt_token_ids) // 16 * 16
        assert output.metrics.num_cached_tokens == num_whole > 0
