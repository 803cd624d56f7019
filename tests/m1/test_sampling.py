"""Sampling: Hugging Face's logits processors, softmax and arithmetic are the oracles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from milestone_llm.core.philox import gumbel_noise, seeds_to_tensor
from milestone_llm.core.request import Request
from milestone_llm.core.sampling import apply_penalties, filter_logits, sample
from milestone_llm.core.sampling_params import SamplingParams

VOCAB_SIZE = 257  # no multiple of 4 or of a vector's width


def make_request(
    name: str = "r", seed: int = 0, prompt: tuple[int, ...] = (1,), num_output: int = 0,
    eos: frozenset[int] = frozenset(), **params: Any,
) -> Request:  # fmt: skip
    request = Request(name, list(prompt), SamplingParams(**params), seed=seed, eos_token_ids=eos)
    request.token_ids += [(7 * index) % VOCAB_SIZE for index in range(num_output)]
    return request


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


# --- the distribution ---------------------------------------------------------------------------


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_tokens_are_drawn_from_softmax(varied: str, temperature: float) -> None:
    num_draws = 8_000
    logits = torch.linspace(-1.5, 1.0, 21).roll(8)
    requests = [make_request(str(i), temperature=temperature) for i in range(num_draws)]
    for index, request in enumerate(requests):
        if varied == "seed":
            request.seed = index
        else:
            request.num_prompt_tokens = len(request.token_ids) - index
    tokens = [token.token_id for token in sample(logits.expand(num_draws, -1), requests)]
    expected = num_draws * torch.softmax(logits.double() / temperature, dim=-1)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(logits))
    # Fixed seeds, so it passes always or never: each count is within four standard deviations.
    assert bool(((counts - expected).abs() < 4 * expected.sqrt()).all())


# --- filters and penalties ----------------------------------------------------------------------


def filter_like_hugging_face(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    steps: list[Any] = []
    if top_k > 0:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        steps.append(MinPLogitsWarper(min_p))
    return LogitsProcessorList(steps)(torch.zeros(len(logits), 1, dtype=torch.long), logits)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("vocab_size", [5, VOCAB_SIZE, 4099])
def test_filters_equal_hugging_face(vocab_size: int, has_ties: bool) -> None:
    settings_ = [
        (top_k, top_p, min_p)
        for top_k in (0, -1, 1, 3, 50, 10_000)
        for top_p in (1.0, 0.93, 0.37, 1e-9)
        for min_p in (0.0, 0.071, 1.0)
    ]
    logits = random_logits(len(settings_), vocab_size)
    if has_ties:
        logits = (logits * 2).round() / 2
    columns = list(zip(*settings_, strict=True))
    filtered = filter_logits(
        logits,
        torch.tensor(columns[0]),
        torch.tensor(columns[1], dtype=torch.float64),
        torch.tensor(columns[2], dtype=torch.float64),
    )
    for row, (top_k, top_p, min_p) in enumerate(settings_):
        expected = filter_like_hugging_face(logits[row : row + 1], top_k, top_p, min_p)
        kept = filtered[row : row + 1]
        if has_ties and top_p < 1:
            # Hugging Face sorts without `stable`, so which of tied tokens it keeps is open.
            kept, expected = kept.sort().values, expected.sort().values
        assert torch.equal(kept, expected), (top_k, top_p, min_p)


@pytest.mark.parametrize("vocab_size", [4, 1000])
def test_top_p_keeps_the_lower_ids_of_tied_tokens(vocab_size: int) -> None:
    kept = filter_logits(
        torch.zeros(1, vocab_size), torch.tensor([0]), torch.tensor([0.5]).double(), torch.zeros(1)
    )
    assert kept[0].isfinite().nonzero().flatten().tolist() == list(range(vocab_size // 2))


@pytest.mark.parametrize("num_output", [0, 90])
def test_biases_come_first_and_what_is_in_the_output_is_counted(num_output: int) -> None:
    """Hugging Face has nothing that counts: it is a few lines here."""
    logits = random_logits(1)
    biases = {3: 4.5, 7: -100.0, 200: 0.25, 14: -0.75}
    request = make_request(
        prompt=(3, 3, 200, 14), num_output=num_output, logit_bias=biases, repetition_penalty=1.3,
        frequency_penalty=0.7, presence_penalty=-1.9,
    )  # fmt: skip
    request.token_ids += [14, 7, 14][:num_output]
    steps: list[Any] = [
        SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()]),
        RepetitionPenaltyLogitsProcessor(1.3),
    ]
    expected = LogitsProcessorList(steps)(torch.tensor([request.token_ids]), logits.clone())
    for token in set(request.output_token_ids):
        expected[0, token] -= torch.tensor(0.7) * request.output_token_ids.count(token)
        expected[0, token] -= torch.tensor(-1.9)
    before = logits.clone()
    assert torch.equal(apply_penalties(logits, [request]), expected)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_output", [0, 2, 3])
def test_min_tokens_masks_stop_tokens_like_hugging_face(num_output: int) -> None:
    logits = random_logits(1)
    request = make_request(
        num_output=num_output, min_tokens=3, stop_token_ids=[5, 9, 10**6], eos=frozenset({0})
    )
    processor: Any = MinNewTokensLengthLogitsProcessor(1, 3, [5, 9, 0])
    expected = processor(torch.tensor([request.token_ids]), logits)
    assert torch.equal(apply_penalties(logits, [request]), expected)
    ignored = make_request(min_tokens=3, ignore_eos=True, eos=frozenset({0}))
    assert torch.equal(apply_penalties(logits, [ignored]), logits)


def test_all_steps_together_equal_hugging_face() -> None:
    logits = random_logits(1)
    request = make_request(
        seed=11, prompt=(4, 8), num_output=6, repetition_penalty=1.2, min_tokens=9,
        eos=frozenset({int(logits.argmax())}), temperature=0.8, top_k=40, top_p=0.9, min_p=0.01,
    )  # fmt: skip
    steps: list[Any] = [
        RepetitionPenaltyLogitsProcessor(1.2),
        MinNewTokensLengthLogitsProcessor(2, 9, list(request.eos_token_ids)),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(40),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.01),
    ]
    scores = LogitsProcessorList(steps)(torch.tensor([request.token_ids]), logits.clone())
    for seed in range(50):
        request.seed = seed
        noise = gumbel_noise(seeds_to_tensor([seed]), torch.tensor([6]), VOCAB_SIZE)
        assert sample(logits, [request])[0].token_id == int((scores + noise).argmax())


# --- log-probabilities, bad input ---------------------------------------------------------------


def test_values_beyond_fp32_mean_their_limits() -> None:
    logits = random_logits(1)
    for request in (make_request(temperature=1e-40, top_p=0.9), make_request(top_p=1e-300)):
        assert sample(logits, [request])[0].token_id == int(logits.argmax())
    for seed in range(20):
        every, plain = (make_request(seed=seed, top_k=top_k) for top_k in (2**40, 0))
        assert sample(logits, [every]) == sample(logits, [plain])
    for penalty in (1e-300, 1e300):
        request = make_request(prompt=(0, 1, 2), repetition_penalty=penalty, top_p=0.5)
        assert sample(torch.tensor([[10.0, 0.0, -10.0]]), [request])[0].token_id in (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 20])
def test_logprobs_are_those_of_the_raw_logits(num_top: int, dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    requests = [
        make_request("greedy", temperature=0, logprobs=num_top),
        make_request("none"),
        make_request("random", seed=4, temperature=2, top_k=90, repetition_penalty=2, logprobs=4),
    ]
    sampled = sample(logits, requests)
    assert sampled[1].logprobs is None
    for row, wanted in [(0, num_top), (2, 4)]:
        expected = logits[row].float().log_softmax(dim=-1)
        logprobs = sampled[row].logprobs
        assert logprobs is not None
        top = set(expected.sort(descending=True, stable=True).indices[:wanted].tolist())
        assert set(logprobs) == top | {sampled[row].token_id}
        assert next(iter(logprobs)) == sampled[row].token_id
        for token_id, logprob in logprobs.items():
            assert logprob.logprob == float(expected[token_id])
            assert logprob.rank == 1 + int((expected > expected[token_id]).sum())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_broken_row_has_no_token_and_the_others_have_theirs(
    params: Any, temperature: float
) -> None:
    requests = [
        make_request(name, temperature=temperature, logprobs=num_logprobs, **params)
        for name, num_logprobs in (("a", 2), ("b", 2), ("c", None))
    ]
    whole = sample(random_logits(3), requests)
    for place, value in ((77, math.nan), (77, math.inf), (slice(None), -math.inf)):
        logits = random_logits(3)
        logits[1, place] = value
        sampled = sample(logits, requests)
        assert sampled[1].token_id == -1
        assert (sampled[0], sampled[2]) == (whole[0], whole[2])
    logits[1, 99] = -4.0  # one number among -inf is enough
    assert sample(logits, requests)[1].token_id == 99


# --- independence of the batch ------------------------------------------------------------------

ANY_PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 60]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "frequency_penalty": st.sampled_from([0.0, -1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.6]),
        "logit_bias": st.sampled_from([{}, {2: 3.5, 6: -100}]),
        "min_tokens": st.sampled_from([0, 6]),
        "stop_token_ids": st.sampled_from([[], [3, 4]]),
        "logprobs": st.sampled_from([None, 0, 3, 11]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(ANY_PARAMS, st.integers(0, 9)), min_size=2, max_size=6),
    st.sampled_from([7, VOCAB_SIZE, 2051]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_request_gets_bitwise_the_same_alone_and_in_any_batch(
    rows: list[tuple[dict[str, Any], int]], vocab_size: int, has_ties: bool, logits_seed: int
) -> None:
    logits = random_logits(len(rows), vocab_size, logits_seed)
    if has_ties:
        logits = logits.round()
    requests = [
        make_request(f"r{index}", num_output=num_output, **params)
        for index, (params, num_output) in enumerate(rows)
    ]
    for request in requests:
        request.seed = request.sampling_params.seed or 0
        request.token_ids = [token_id % vocab_size for token_id in request.token_ids]
    together = sample(logits, requests)
    reversed_ = sample(logits.flip(0), requests[::-1])[::-1]
    for row, request in enumerate(requests):
        alone = sample(logits[row : row + 1], [request])
        assert alone == together[row : row + 1]
        assert alone == reversed_[row : row + 1]


def test_of_equally_likely_tokens_the_lower_ids_are_named_first() -> None:
    (sampled,) = sample(torch.zeros(1, 40), [make_request(temperature=0, logprobs=3)])
    assert sampled.logprobs is not None
    assert [(token, each.rank) for token, each in sampled.logprobs.items()] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
