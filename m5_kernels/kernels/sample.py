"""Sampling by the Gumbel-max trick: token = argmax(logits / temperature + noise) over kept ids.

    logits [num_rows, vocab]   |== chunk ==|== chunk ==|== chunk ==| ...   one program each
                                  |  |  |     |  |  |     |  |  |
    rough best score of a part    *  *  *     *  *  *     *  *  *         then one program per row:
                                                 |                        the winning part again,
                                            token, exactly                and exactly

The noise of an id is a function of (seed, output position, id) alone - Philox4x32-10, the same
bits as `core.philox` - so no state is kept, and every chunk can make its own noise. A row without
filters is read once. It needs no softmax, cumulative sum or sort, each a trip over
`[num_rows, vocab]`. For rows with top-k, top-p or min-p, `find_cutoffs` first finds which logits
are kept.

Noise is made in fp32 first. With that rounding, only a few ids could be the best. They are then
scored again in fp64, as the specification says. So tokens are equal on a GPU and a CPU, for the
price of two fp64 logarithms a row.
"""

from __future__ import annotations

import torch

from milestone_llm.core.philox import gumbel_noise
from milestone_llm.core.sampling import MIN_TEMPERATURE, filter_logits

from .cutoff import LOWEST_TEMPERATURE, find_cutoffs
from .launch import PLAIN, Launch
from .pdl import wait_for_previous
from .triton_or_twin import ceil_div, fast_log2, next_power_of_2, tl, triton

CHUNK = 4096  # vocabulary ids that a program scores
PART = 1024  # ids that share a best score; so many are scored again


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    has_filters: bool = True,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Choose a token for each sequence of a step.

    logits: `[num_seqs, vocab_size]`, rows contiguous, any float type, not changed.
    rows: int32 `[num_seqs]`, the row with each sequence's parameters; -1 for none: it gets any
    token.
    temperature: fp32 `[num_rows]`, 0 takes the largest logit; top_k: int32, 0 or -1 keeps all;
    top_p: fp32, 1 keeps all; min_p: fp32, 0 keeps all. Ties with the k-th logit are all kept. Of
    ids tied at the edge of top-p, the lower ones are kept.
    seeds: int64 `[num_rows]`, the bits of uint64 seeds.
    positions: int32 or int64 `[num_seqs]`, index of the output token.
    has_filters: False promises that no row filters, and saves a launch.
    The kernels may start before the previous ones end, which may write the logits, but no
    parameters.
    Returns int32 `[num_seqs]`: of equal scores the lowest id; -1 where logits hold a NaN or an
    infinity, or nothing but -inf.
    """
    if not launch.runs_triton(logits):
        return sample_torch(
            logits, rows, temperature, top_k, top_p, min_p, seeds, positions, has_filters
        )
    num_seqs, vocab_size = logits.shape
    num_chunks = ceil_div(vocab_size, CHUNK)
    num_parts = num_chunks * (CHUNK // PART)
    tokens = torch.empty(num_seqs, dtype=torch.int32, device=logits.device)
    if num_seqs == 0:
        return tokens
    scores = torch.empty(num_seqs, num_parts, device=logits.device)
    cutoffs, last_ties = None, None
    if has_filters:
        cutoffs, last_ties = find_cutoffs(logits, rows, temperature, top_k, top_p, min_p, launch)
    arguments = (logits, rows, temperature, seeds, positions, cutoffs, last_ties, scores)
    constants = {
        "PART": PART,
        "num_warps": 4,
        **launch.pdl_options(),
    }
    launch.kernel(_score_chunk_kernel, (num_seqs, num_chunks))(
        *arguments, vocab_size, logits.stride(0), CHUNK=CHUNK, **constants
    )
    launch.kernel(_pick_best_kernel, (num_seqs,))(
        *arguments, tokens, vocab_size, logits.stride(0), num_parts,
        PARTS_PAD=next_power_of_2(num_parts), **constants,
    )  # fmt: skip
    return tokens


@triton.jit
def _score_chunk_kernel(
    logits, rows, temperature, seeds, positions, cutoffs, last_ties, scores,
    vocab_size, logits_stride,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.maximum(tl.load(rows + seq), 0)
    heat = tl.load(temperature + row)
    noise = _rough_noise(heat, tl.load(seeds + row), tl.load(positions + seq), chunk, CHUNK)
    wait_for_previous(PDL)  # after the noise, which needs no logits
    raw, rough, _ = _rough_scores(
        logits, heat, noise, cutoffs, last_ties, seq, chunk, vocab_size, logits_stride, CHUNK
    )
    # Infinity marks a broken row; a score that is kept is always finite.
    is_broken = tl.sum(((raw != raw) | (raw == float("inf"))).to(tl.int32)) > 0
    PARTS: tl.constexpr = CHUNK // PART
    best = tl.max(tl.reshape(tl.max(rough, 1), [PARTS, PART // 4]), 1)
    best = tl.where(is_broken, float("inf"), best)
    tl.store(scores + (seq * tl.num_programs(1) + chunk) * PARTS + tl.arange(0, PARTS), best)


@triton.jit
def _pick_best_kernel(
    logits, rows, temperature, seeds, positions, cutoffs, last_ties, scores, tokens,
    vocab_size, logits_stride, num_parts,
    PARTS_PAD: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    row = tl.maximum(tl.load(rows + seq), 0)
    heat = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + seq)
    parts = tl.arange(0, PARTS_PAD)
    wait_for_previous(PDL)
    part_scores = tl.load(
        scores + seq * num_parts + parts, mask=parts < num_parts, other=-float("inf")
    )
    rough_best = tl.max(part_scores)
    slack = tl.where(heat > 0, 1e-4 + 1e-6 * tl.abs(rough_best), 0.0)
    best_score = -float("inf")
    best_id = -1
    if tl.abs(rough_best) < float("inf"):
        is_part = part_scores >= rough_best - slack
        part = -1
        for _ in range(tl.sum(is_part.to(tl.int32))):
            part = tl.min(tl.where(is_part & (parts > part), parts, PARTS_PAD))
            _, rough, columns = _rough_scores(
                logits, heat, _rough_noise(heat, seed, position, part, PART),
                cutoffs, last_ties, seq, part, vocab_size, logits_stride, PART,
            )  # fmt: skip
            is_candidate = rough >= rough_best - slack
            # All candidates of a greedy row are equal, and the token is the first of them.
            num_candidates = tl.sum(is_candidate.to(tl.int32))
            num_candidates = tl.where(heat > 0, num_candidates, 1)
            token_id = -1
            for _ in range(num_candidates):
                token_id = tl.min(
                    tl.where(is_candidate & (columns > token_id), columns, vocab_size)
                )
                score = tl.load(logits + seq.to(tl.int64) * logits_stride + token_id)
                score = score.to(tl.float32)
                if heat > 0:
                    noise = _gumbel(seed, position, token_id)
                    score = tl.div_rn(score, tl.maximum(heat, LOWEST_TEMPERATURE)) + noise
                best_id = tl.where(score > best_score, token_id, best_id)
                best_score = tl.maximum(score, best_score)
    tl.store(tokens + seq, best_id)


@triton.jit
def _rough_scores(
    logits, heat, noise, cutoffs, last_ties, seq, chunk,
    vocab_size, logits_stride,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return logits, scores to about 1e-5, and ids of a chunk, `[CHUNK / 4, 4]` each.

    The score of an id that is not kept is -inf.
    """
    # One counter of the generator gives four numbers, which are a row here.
    columns = chunk * CHUNK + (tl.arange(0, CHUNK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :])
    pointers = logits + seq.to(tl.int64) * logits_stride + columns
    raw = tl.load(pointers, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
    rough = raw * tl.where(heat > 0, 1.0 / tl.maximum(heat, LOWEST_TEMPERATURE), 1.0) + noise
    if cutoffs is not None:
        cutoff = tl.load(cutoffs + seq)
        is_tie = (raw == cutoff) & (columns <= tl.load(last_ties + seq))
        rough = tl.where((raw > cutoff) | is_tie, rough, -float("inf"))
    return raw, rough, columns


@triton.jit
def _rough_noise(heat, seed, position, chunk, CHUNK: tl.constexpr):
    """Return the noise of a chunk's ids to about 1e-5, `[CHUNK / 4, 4]`; zeros for a greedy row."""
    noise = tl.zeros([CHUNK // 4, 4], dtype=tl.float32)
    if heat > 0:
        counters = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        zeros = tl.zeros_like(counters)
        bits_0, bits_1, bits_2, bits_3 = tl.philox(
            seed, counters, zeros + position.to(tl.int32), zeros, zeros
        )
        bits = tl.join(tl.join(bits_0, bits_2), tl.join(bits_1, bits_3))
        noise = _rough_gumbel(tl.reshape(bits, noise.shape))
    return noise


@triton.jit
def _rough_gumbel(bits):
    """Return -log(-log(u)) in fp32, to about 1e-5 everywhere.

    The fast logarithm alone is not that exact near 1.
    """
    LN_2: tl.constexpr = 0.6931471805599453
    steps = (bits >> 9).to(tl.float32)
    uniform = (steps + 0.5) * 1.1920928955078125e-07
    rest = (8388607.5 - steps) * 1.1920928955078125e-07  # 1 - uniform, exactly
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    return -LN_2 * fast_log2(tl.where(rest < 0.03, series, -LN_2 * fast_log2(uniform)))


@triton.jit
def _gumbel(seed, position, token_id):
    """Return the noise of one id as the specification computes it: in fp64, rounded to fp32."""
    zero = token_id * 0
    position = zero + position.to(tl.int32)
    bits_0, bits_1, bits_2, bits_3 = tl.philox(seed, token_id // 4, position, zero, zero)
    lane = token_id % 4
    bits = tl.where(lane < 2, tl.where(lane == 0, bits_0, bits_1),
                    tl.where(lane == 2, bits_2, bits_3))  # fmt: skip
    uniform = ((bits >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


def sample_torch(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    has_filters: bool = True,
) -> torch.Tensor:
    """Specify `sample`, with the filters and the noise of the first milestone."""
    index = rows.clamp(min=0)
    temperature, seeds = temperature[index], seeds[index]
    raw = logits.float()
    is_broken = ~raw.amax(-1).isfinite()  # the maximum of a row with NaN is NaN
    tokens = raw.argmax(-1)
    is_random = temperature > 0
    if is_random.any():
        scaled = raw / temperature.clamp(min=MIN_TEMPERATURE)[:, None]
        if has_filters:
            k, p, floor = (parameter[index].cpu() for parameter in (top_k, top_p, min_p))
            scaled = filter_logits(scaled, k.long(), p.double(), floor.double())
        noise = gumbel_noise(seeds[is_random], positions[is_random].long(), logits.shape[-1])
        tokens[is_random] = (scaled[is_random] + noise).argmax(-1)
    return tokens.masked_fill(is_broken, -1).int()
