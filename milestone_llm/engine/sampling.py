"""From logits to tokens, for every request of a step at once and each in its own way.

A row goes through repetition penalty, `min_tokens` mask, temperature, top-k, top-p and min-p (the
order of Hugging Face), then argmax(scores + Gumbel noise), which draws from softmax(scores). Work
is vectorised over the rows that ask for it and skipped where none does: a batch of greedy requests
costs one argmax. Sampling keeps no state, and no row sees another: sums whose last bits would
depend on the batch are taken over integers, so a request gets the same tokens alone and in company.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from milestone_llm.engine.outputs import Logprob

from .philox import gumbel_noise, gumbel_noise_at, seeds_to_tensor
from .plan import ScheduledRequest
from .request import Request, SampledToken

MIN_TEMPERATURE = 1e-5
"""A temperature below acts like this one: any smaller, and logits / temperature may overflow."""


def sample(logits: Tensor, requests: list[Request]) -> dict[str, SampledToken]:
    """Choose the next token of each request, with log-probabilities where it wants them.

    Args:
        logits: `[num_rows, vocab_size]`, any float type; all work is done in fp32. Not changed.
        requests: `[num_rows]`, whose rows these are; `num_output_tokens` tells which output token
            is being sampled.

    Returns:
        The token of each request by its id, -1 for one whose row holds a NaN or +inf or leaves no
        token to choose. Log-probabilities are those of the raw logits, before penalties,
        temperature and filters.
    """
    assert len(logits) == len(requests), f"{len(logits)} rows for {len(requests)} requests"
    if not requests:
        return {}
    raw = logits.float()
    scores = apply_penalties(raw, requests)
    best, token_ids = scores.max(dim=-1)
    rows = _rows(requests, lambda request: not request.sampling_params.is_greedy)
    if rows:
        token_ids[rows] = _draw(scores[rows], [requests[row] for row in rows])
    packed = [torch.stack([token_ids.double(), best.double()], dim=-1).flatten()]
    rows = _rows(requests, lambda request: request.sampling_params.logprobs is not None)
    num_top = max((requests[row].sampling_params.logprobs or 0 for row in rows), default=0)
    num_top = min(num_top, logits.shape[-1])
    if rows:
        packed.append(logprob_columns(raw[rows], token_ids[rows], num_top).flatten())
    # fp64 holds ids, ranks and fp32 numbers alike, so one transfer brings everything to the host.
    numbers = torch.cat(packed).tolist()

    chosen = {
        request.request_id: int(numbers[2 * row]) if math.isfinite(numbers[2 * row + 1]) else -1
        for row, request in enumerate(requests)
    }
    sampled = {name: SampledToken(token_id) for name, token_id in chosen.items()}
    width = 2 + 2 * num_top
    for index, row in enumerate(rows):
        name = requests[row].request_id
        columns = numbers[2 * len(requests) + index * width :][:width]
        num_wanted = requests[row].sampling_params.logprobs or 0
        logprobs = read_logprobs(chosen[name], columns, num_wanted)
        sampled[name] = SampledToken(chosen[name], logprobs)
    return sampled


def apply_penalties(logits: Tensor, requests: list[Request]) -> Tensor:
    """Repetition penalty (CTRL, Keskar et al. 2019, section 4.1) and `min_tokens`.

    Args:
        logits: `[num_rows, vocab_size]` fp32; not changed, but returned if there is nothing to do.

    Returns:
        `[num_rows, vocab_size]` fp32. Logits of tokens in the prompt or the output are divided by
        the penalty where positive, multiplied where negative; stop tokens are -inf while the
        output has fewer than `min_tokens` tokens.
    """
    rows: list[int] = []
    ids: list[int] = []
    penalties: list[float] = []
    stop_rows: list[int] = []
    stop_ids: list[int] = []
    for row, request in enumerate(requests):
        params = request.sampling_params
        if params.repetition_penalty != 1:
            seen = set(request.token_ids)
            rows += [row] * len(seen)
            ids += seen
            penalties += [clamped_penalty(params.repetition_penalty)] * len(seen)
        if request.num_output_tokens < params.min_tokens:
            stops = [token_id for token_id in request.stop_token_ids if token_id < logits.shape[-1]]
            stop_rows += [row] * len(stops)
            stop_ids += stops
    if not ids and not stop_ids:
        return logits
    scores = logits.clone()
    if ids:
        where = torch.tensor([rows, ids], device=logits.device).unbind()
        penalty = torch.tensor(penalties, dtype=torch.float32, device=logits.device)
        seen_logits = logits[where]
        scores[where] = torch.where(seen_logits < 0, seen_logits * penalty, seen_logits / penalty)
    if stop_ids:
        scores[torch.tensor([stop_rows, stop_ids], device=logits.device).unbind()] = -math.inf
    return scores


def clamped_penalty(repetition_penalty: float) -> float:
    """A penalty that fp32 can hold: past 1e30 either way there is no difference left to see."""
    return min(max(repetition_penalty, 1e-30), 1e30)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what a row's top-k, then top-p, then min-p leave out; the most likely stays.

    Tokens tied with the k-th most likely one are all kept, as in Hugging Face. top-p (nucleus
    sampling, Holtzman et al. 2020) keeps the smallest set that has at least top_p of the
    probability left by top-k; of tied tokens the lower ids are kept.

    Args:
        logits: `[num_rows, vocab_size]` fp32, already divided by the temperature.
        top_k: `[num_rows]` int64; below 1 or above vocab_size keeps all.
        top_p: `[num_rows]` fp64; 1 keeps all.
        min_p: `[num_rows]` fp64; 0 keeps all. All three best live on the CPU, where looking
            into them does not wait for the device.

    Returns:
        `[num_rows, vocab_size]` fp32.
    """
    steps: tuple[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]], ...] = (
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
    # Tokens below (1 - top_p) / vocab_size are outside, as together they do not reach 1 - top_p.
    # In a language model's distribution few others are left to be sorted.
    outside = mass < (1 - top_p) * total / logits.shape[-1]
    values, ids = _compact(logits.masked_fill(outside, -math.inf))
    order = values.sort(dim=-1, descending=True, stable=True).indices
    order = order if ids is None else ids.gather(-1, order)
    mass = mass.gather(-1, order)
    is_outside = mass.cumsum(dim=-1) - mass >= top_p * total
    is_outside[:, 0] = False
    return outside.scatter(-1, order, is_outside)


def _outside_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    return _relative_probability(logits) < min_p.to(logits.device)[:, None]


def _relative_probability(logits: Tensor) -> Tensor:
    return (logits.double() - logits.amax(dim=-1, keepdim=True).double()).exp()


def _compact(scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """The few columns that filters left: scores and ids `[num_rows, num_left]`, ids ascending.

    Where many are left, the scores as they are and None.
    """
    num_left = max(1, int((scores > -math.inf).sum(dim=-1).max()))
    if num_left > scores.shape[-1] // 8:
        return scores, None
    ids = scores.topk(num_left).indices.sort(dim=-1).values
    return scores.gather(-1, ids), ids


def _draw(scores: Tensor, requests: list[Request]) -> Tensor:
    """Tokens `[num_rows]` drawn from softmax(filter(scores / temperature)) by the Gumbel-max trick.

    Whichever of logit_i + g_i is largest, with g standard Gumbel, is a draw from softmax(logits).
    """
    params = [request.sampling_params for request in requests]
    device = scores.device
    temperature = [max(each.temperature, MIN_TEMPERATURE) for each in params]
    scores = scores / torch.tensor(temperature, dtype=torch.float32, device=device)[:, None]
    filtered = filter_logits(
        scores,
        torch.tensor([each.top_k for each in params]),
        # In fp32 first, as a GPU kernel knows them: what is kept must not depend on who samples.
        torch.tensor([each.top_p for each in params], dtype=torch.float32).double(),
        torch.tensor([each.min_p for each in params], dtype=torch.float32).double(),
    )
    seeds = seeds_to_tensor([request.seed for request in requests], device)
    positions = torch.tensor([request.num_output_tokens for request in requests], device=device)
    values, ids = (scores, None) if filtered is scores else _compact(filtered)
    if ids is None:
        return (values + gumbel_noise(seeds, positions, scores.shape[-1])).argmax(dim=-1)
    best = (values + gumbel_noise_at(seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    return ids.gather(-1, best).squeeze(-1)


def logprob_columns(raw: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Log-probabilities of one token a row and of the most likely ones, in fp64, which holds all.

    Args:
        raw: logits `[num_rows, vocab_size]` fp32, before penalties, temperature and filters.
        token_ids: `[num_rows]` int64.
        num_top: at most vocab_size.

    Returns:
        `[num_rows, 2 + 2 * num_top]`: log-probability of the row's token, how many tokens are more
        likely, then the ids and the log-probabilities of the `num_top` most likely ones.
    """
    logprobs = raw.log_softmax(dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    num_above = (logprobs > own).sum(dim=-1, keepdim=True)
    # Which of tied values topk takes depends on k, so ids break ties: the bits of a float, with
    # all but the sign flipped where it is negative, order like the float; the id goes below them.
    bits = logprobs.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[-1], device=raw.device)
    top_ids = ((ordered << 32) - ids).topk(num_top).indices
    top = logprobs.gather(-1, top_ids)
    return torch.cat([column.double() for column in (own, num_above, top_ids, top)], dim=-1)


def note_prompt_logprobs(rows: list[ScheduledRequest], logits: Tensor) -> None:
    """Write log-probabilities of prompt tokens into the rows whose requests want them.

    Args:
        logits: `[num_positions, vocab_size]` at the `prompt_positions` of all rows in order, each
            for the token that comes next.
    """
    first = 0
    for row in rows:
        positions, request = row.prompt_positions, row.request
        num_wanted = request.sampling_params.prompt_logprobs or 0
        for some in range(0, len(positions), 64):  # as many as are converted to fp64 at a time
            part = positions[some : some + 64]
            token_ids = [request.token_ids[position + 1] for position in part]
            own = torch.tensor(token_ids, device=logits.device)
            raw = logits[first : first + len(part)].float()
            columns = logprob_columns(raw, own, num_wanted).tolist()
            for position, token_id, numbers in zip(part, token_ids, columns, strict=True):
                entry = read_logprobs(token_id, numbers, num_wanted)
                row.prompt_logprobs[position + 1] = entry
            first += len(part)


def read_logprobs(token_id: int, columns: list[float], num_wanted: int) -> dict[int, Logprob]:
    """A row of `logprob_columns` for a `RequestOutput`: the token's own, then the top ones."""
    num_top = (len(columns) - 2) // 2
    own = {token_id: Logprob(columns[0], int(columns[1]) + 1)}
    top: dict[int, Logprob] = {}
    rank, previous = 0, math.inf
    pairs = zip(columns[2 : 2 + num_top], columns[2 + num_top :], strict=True)
    for place, (top_id, logprob) in enumerate(list(pairs)[:num_wanted], start=1):
        rank = rank if logprob == previous else place  # equally likely tokens share a rank
        previous = logprob
        top[int(top_id)] = Logprob(logprob, rank)
    return own | top


def _rows(requests: list[Request], is_meant: Callable[[Request], bool]) -> list[int]:
    return [row for row, request in enumerate(requests) if is_meant(request)]
