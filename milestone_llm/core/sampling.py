"""From logits to tokens, for every request of a step at once and each in its own way.

A row goes through `logit_bias`, repetition, frequency and presence penalty, the mask of its own
allowed tokens and the mask of `min_tokens` (the order of vLLM). Then come temperature, top-k, top-p
and min-p (the order of Hugging Face), then argmax(scores + Gumbel noise), which draws from
softmax(scores). Work is vectorised over the rows that ask for it and skipped where no row does: a
batch of greedy requests costs one argmax.

Sampling keeps no state, and no row sees another. Sums whose last bits would depend on the batch are
taken over integers, so a request gets the same tokens alone as in a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .allowed_tokens import AllowedTokens
from .logprobs import logprob_columns, read_logprobs
from .outputs import Logprob, SampledToken
from .philox import gumbel_noise, gumbel_noise_at, seeds_to_tensor
from .sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-5  # any smaller, and logits / temperature may overflow


class SamplingState(Protocol):
    """The part of a request that sampling needs: its tokens so far, and how to choose the next."""

    @property
    def sampling_params(self) -> SamplingParams:
        """How tokens are chosen."""

    @property
    def seed(self) -> int:
        """Seed of the noise."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt, then of the output."""

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens: the position of the next one."""

    @property
    def num_known_tokens(self) -> int:
        """How many of the output's are known. The others may turn out wrong."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end the request."""

    @property
    def allowed_tokens(self) -> AllowedTokens | None:
        """A further rule for the next token; None: there is none."""


def sample(logits: Tensor, requests: Sequence[SamplingState]) -> list[SampledToken]:
    """Choose the next token of each request, with log-probabilities where it wants them.

    Args:
        logits: `[num_rows, vocab_size]`, any float type; all work is done in fp32. Not changed.
        requests: the request of each row, `[num_rows]`.

    Returns:
        The token of each row; -1 for a row that holds a NaN or +inf or leaves no token to choose.
        Log-probabilities are those of the raw logits.
    """
    assert len(logits) == len(requests), f"{len(logits)} rows for {len(requests)} requests"
    if not requests:
        return []
    raw = logits.float()
    scores = apply_penalties(raw, requests)
    best, token_ids = scores.max(dim=-1)
    random = [row for row, each in enumerate(requests) if each.sampling_params.temperature > 0]
    if random:
        token_ids[random] = _draw(scores[random], [requests[row] for row in random])
    ids, scores_of_ids = torch.stack([token_ids.double(), best.double()]).tolist()  # one transfer
    chosen = [int(i) if math.isfinite(s) else -1 for i, s in zip(ids, scores_of_ids, strict=True)]
    logprobs: dict[int, dict[int, Logprob]] = {}
    wanted = [each.sampling_params.logprobs for each in requests]
    if rows := [row for row, num_top in enumerate(wanted) if num_top is not None]:
        num_top = min(max(num_top or 0 for num_top in wanted), logits.shape[-1])
        columns = logprob_columns(raw[rows], token_ids[rows], num_top).tolist()
        for row, numbers in zip(rows, columns, strict=True):
            logprobs[row] = read_logprobs(chosen[row], numbers, wanted[row] or 0)
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(chosen)]


def apply_penalties(logits: Tensor, requests: Sequence[SamplingState]) -> Tensor:
    """Apply `logit_bias`, three penalties, allowed tokens and `min_tokens`, in this order.

    The bias comes first, as in vLLM: it is part of what the model says. The repetition penalty
    (CTRL, Keskar et al. 2019, section 4.1) covers tokens of the prompt and the output. It divides
    positive logits and multiplies negative ones, by the sign of logit + bias. Frequency and
    presence penalty cover tokens of the output. The frequency penalty is subtracted once per
    occurrence of a token, the presence penalty once per token. Tokens that are not allowed become
    -inf. So do stop tokens while the output has fewer than `min_tokens` tokens, unless nothing else
    is allowed.

    Returns:
        `[num_rows, vocab_size]` fp32; the same tensor `logits` if there is nothing to do.
    """
    scores = logits
    for row, request in enumerate(requests):
        params = request.sampling_params
        is_counted = bool(params.frequency_penalty or params.presence_penalty)
        may_stop = request.num_output_tokens >= params.min_tokens or not request.stop_token_ids
        rule = request.allowed_tokens
        is_plain = may_stop and params.repetition_penalty == 1 and rule is None
        if is_plain and not (is_counted or params.logit_bias):
            continue
        scores = logits.clone() if scores is logits else scores
        own = scores[row]
        if params.logit_bias:
            own[_index(params.logit_bias, own)] += own.new_tensor([*params.logit_bias.values()])
        if params.repetition_penalty != 1:
            seen = _index(set(request.token_ids), own)
            before, penalty = own[seen], own.new_tensor(params.repetition_penalty)
            own[seen] = torch.where(before < 0, before * penalty, before / penalty)
        if is_counted:
            num_prompt_tokens = len(request.token_ids) - request.num_output_tokens
            counts = Counter(request.token_ids[num_prompt_tokens:])
            seen = _index(counts, own)
            own[seen] -= params.frequency_penalty * own.new_tensor([*counts.values()])
            own[seen] -= params.presence_penalty
        if rule is not None:
            num_prompt_tokens = len(request.token_ids) - request.num_output_tokens
            bits = rule.bits(request.token_ids[num_prompt_tokens:], request.num_known_tokens)
            own.masked_fill_(~unpack_bits(bits.to(own.device), len(own)), -math.inf)
        if not may_stop:
            stops = [token_id for token_id in request.stop_token_ids if token_id < logits.shape[-1]]
            banned = own.index_fill(0, _index(stops, own), -math.inf)
            if rule is None or banned.max() > -math.inf:
                own.copy_(banned)
    return scores


def unpack_bits(words: Tensor, size: int) -> Tensor:
    """Turn int32 `[..., ceil(size / 32)]` into bool `[..., size]`, the lowest bit of a word
    first."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)[..., :size]


def _index(token_ids: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.long, device=like.device)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf the tokens that a row's top-k, then top-p, then min-p leave out; the most likely
    token stays.

    Tokens tied with the k-th most likely one are all kept, as in Hugging Face. top-p (Holtzman et
    al. 2020) keeps the smallest set with at least top_p of the probability left by top-k. Of tied
    tokens it keeps the lower ids.

    Args:
        logits: `[num_rows, vocab_size]` fp32, already divided by the temperature.
        top_k: `[num_rows]` int64; below 1 or above vocab_size keeps all. Keep this and the next two
            on the CPU: there, reading their values does not wait for the device.
        top_p: `[num_rows]` fp64; 1 keeps all.
        min_p: `[num_rows]` fp64; 0 keeps all.
    """
    steps = (
        (top_k, (top_k >= 1) & (top_k < logits.shape[-1]), _outside_top_k),
        (top_p, top_p < 1, _outside_top_p),
        (min_p, min_p > 0, _outside_min_p),
    )
    for limits, is_asked, outside in steps:
        rows = is_asked.nonzero().flatten()
        if len(rows):
            asking = logits[rows.to(logits.device)]
            kept = asking.masked_fill(outside(asking, limits[rows]), -math.inf)
            logits = logits.index_copy(0, rows.to(logits.device), kept)
    return logits


def _outside_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    largest = logits.topk(int(top_k.max())).values
    return logits < largest.gather(-1, top_k.to(logits.device)[:, None] - 1)


def _outside_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    values, ids = _compact(logits)
    if ids is not None:
        outside = _outside_top_p(values, top_p)
        return torch.ones_like(logits, dtype=torch.bool).scatter(-1, ids, outside)
    top_p = top_p.to(logits.device)[:, None]
    # exp(logit - maximum) as a multiple of 2**-40: integers add up to the same sum in any order.
    mass = (_relative_probability(logits) * 2.0**40).round().long()
    total = mass.sum(dim=-1, keepdim=True)
    # Tokens below (1 - top_p) / vocab_size are outside: together they do not reach 1 - top_p.
    # In a language model's distribution few others are left to be sorted.
    outside = mass < (1 - top_p) * total / logits.shape[-1]
    values, ids = _compact(logits.masked_fill(outside, -math.inf))
    order = values.sort(dim=-1, descending=True, stable=True).indices
    order = order if ids is None else ids.gather(-1, order)
    mass = mass.gather(-1, order)
    is_outside = mass.cumsum(dim=-1) - mass >= top_p * total
    return outside.scatter(-1, order, is_outside)


def _outside_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    return _relative_probability(logits) < min_p.to(logits.device)[:, None]


def _relative_probability(logits: Tensor) -> Tensor:
    return (logits.double() - logits.amax(dim=-1, keepdim=True).double()).exp()


def _compact(scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the few columns that filters left: scores and ids `[num_rows, num_left]`, ids
    ascending.

    Where many columns are left, return the unchanged scores and None.
    """
    num_left = max(1, int((scores > -math.inf).sum(dim=-1).max()))
    if num_left > scores.shape[-1] // 8:
        return scores, None
    ids = scores.topk(num_left).indices.sort(dim=-1).values
    return scores.gather(-1, ids), ids


def _draw(scores: Tensor, requests: Sequence[SamplingState]) -> Tensor:
    """Draw tokens `[num_rows]` from softmax(filter(scores / temperature)) by the Gumbel-max trick.

    The index i of the largest logit_i + g_i, with g standard Gumbel, is a draw from
    softmax(logits).
    """
    params = [request.sampling_params for request in requests]
    temperature = [max(each.temperature, MIN_TEMPERATURE) for each in params]
    scores = scores / torch.tensor(temperature, dtype=torch.float32, device=scores.device)[:, None]
    filtered = filter_logits(
        scores,
        torch.tensor([each.top_k for each in params]),
        # In fp32 first, as in a GPU kernel: the tokens kept must not depend on where we sample.
        torch.tensor([each.top_p for each in params], dtype=torch.float32).double(),
        torch.tensor([each.min_p for each in params], dtype=torch.float32).double(),
    )
    seeds = seeds_to_tensor([request.seed for request in requests], scores.device)
    output_positions = [request.num_output_tokens for request in requests]
    positions = torch.tensor(output_positions, device=scores.device)
    values, ids = (scores, None) if filtered is scores else _compact(filtered)
    if ids is None:
        return (values + gumbel_noise(seeds, positions, scores.shape[-1])).argmax(dim=-1)
    best = (values + gumbel_noise_at(seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    return ids.gather(-1, best).squeeze(-1)
