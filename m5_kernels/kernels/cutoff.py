"""Top-k, top-p and min-p without a sort: find the smallest logit of each sequence that they keep.

    ids that are kept:   logit > cutoff,  or logit == cutoff and id <= last tie

A program finds the cutoff by fixing the bits of that number one by one, from the highest. It asks
for each bit: if this bit is one, are the logits from there on still k in number, or p in weight? So
bf16 logits take 16 passes and fp32 ones 32, all from the L2 cache. Top-p looks at what top-k has
left. Min-p depends on the largest logit only, and raises the cutoff at the end.
"""

from __future__ import annotations

import torch

from milestone_llm.core.sampling import MIN_TEMPERATURE

from .gpu_tiles import most_warps
from .launch import PLAIN, Launch
from .triton_or_twin import next_power_of_2, tl, triton

LOWEST_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


def find_cutoffs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    launch: Launch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find which logits the filters keep. Arguments as in `sample`, whose twin is the
    specification.

    Returns fp32 and int32 `[num_seqs]`: the smallest logit that is kept, -inf if all are, and the
    last id that is kept of those that equal it.
    """
    num_seqs, vocab_size = logits.shape
    cutoffs = torch.empty(num_seqs, device=logits.device)
    last_ties = torch.empty(num_seqs, dtype=torch.int32, device=logits.device)
    launch.kernel(_find_cutoff_kernel, (num_seqs,))(
        logits, rows, temperature, top_k, top_p, min_p, cutoffs, last_ties,
        vocab_size, logits.stride(0),
        # bf16 numbers, converted to fp32, differ in their upper 16 bits only; fp16 ones in 19.
        LOW_BIT={torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),
        BLOCK=min(16384, next_power_of_2(vocab_size)),
        num_warps=most_warps(logits.device) if vocab_size > 4096 else 4,
    )  # fmt: skip
    return cutoffs, last_ties


@triton.jit
def _find_cutoff_kernel(
    logits, rows, temperature, top_k, top_p, min_p, cutoffs, last_ties,
    vocab_size, logits_stride,
    LOW_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the smallest kept logit of a sequence, and the last id kept of those that equal it."""
    seq = tl.program_id(0)
    row = tl.maximum(tl.load(rows + seq), 0)
    row_logits = logits + seq.to(tl.int64) * logits_stride
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    has_k = (k >= 1) & (k < vocab_size)
    cutoff = -float("inf")
    last_tie = vocab_size
    if (heat > 0) & (has_k | (p < 1) | (floor > 0)):
        to_log2 = 1.4426950408889634 / tl.maximum(heat, LOWEST_TEMPERATURE)
        largest = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            largest = tl.maximum(largest, _load(row_logits, start, vocab_size, BLOCK))
        top = tl.max(largest)
        if has_k:
            cutoff = _smallest_kept(
                row_logits, vocab_size, top, to_log2, cutoff, k.to(tl.float32), True, LOW_BIT, BLOCK
            )
        if p < 1:
            k_cutoff = cutoff
            total = _mass(row_logits, vocab_size, top, to_log2, k_cutoff, False, BLOCK)
            goal = p * total
            cutoff = _smallest_kept(
                row_logits, vocab_size, top, to_log2, k_cutoff, goal, False, LOW_BIT, BLOCK
            )
            # Of the ids at the edge, keep as many as it takes to reach the goal.
            above = _mass(row_logits, vocab_size, top, to_log2, cutoff, True, BLOCK)
            each = tl.exp2((cutoff - top) * to_log2)
            num_ties = tl.maximum(tl.ceil((goal - above) / each), 1.0)
            last_tie = _id_of_tie(row_logits, vocab_size, cutoff, num_ties, BLOCK)
        if floor > 0:
            lowest = top + tl.log2(floor) / to_log2
            last_tie = tl.where(lowest > cutoff, vocab_size, last_tie)
            cutoff = tl.maximum(cutoff, lowest)
    tl.store(cutoffs + seq, cutoff)
    tl.store(last_ties + seq, last_tie)


@triton.jit
def _load(row_logits, start, vocab_size, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    raw = tl.load(row_logits + columns, mask=columns < vocab_size, other=-float("inf"))
    return raw.to(tl.float32) + 0.0  # -0.0 becomes 0.0, which equals it


@triton.jit
def _mass(row_logits, vocab_size, top, to_log2, cutoff, ABOVE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of exp2((logit - top) * to_log2) over logits >= cutoff (ABOVE: > cutoff)."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        raw = _load(row_logits, start, vocab_size, BLOCK)
        is_counted = raw > cutoff if ABOVE else raw >= cutoff
        total += tl.where(is_counted, tl.exp2((raw - top) * to_log2), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _smallest_kept(
    row_logits, vocab_size, top, to_log2, cutoff, goal,
    IS_COUNT: tl.constexpr,
    LOW_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest t such that the logits from t to top, but not below cutoff, have mass
    `goal`.

    The mass of a logit is exp2((logit - top) * to_log2), or 1 (IS_COUNT). The bits of t are fixed
    from the highest to LOW_BIT, in an encoding that has the same order as the numbers.
    """
    prefix = tl.zeros([], dtype=tl.uint32)
    for step in range(32 - LOW_BIT):
        trial = prefix | (tl.full([], 1, dtype=tl.uint32) << (31 - LOW_BIT - step))
        # It is cheaper to decode one number than to encode all logits. A trial past infinity
        # decodes to a NaN, which no logit reaches.
        lowest = _decode(trial << LOW_BIT)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            raw = _load(row_logits, start, vocab_size, BLOCK)
            mass = 1.0 if IS_COUNT else tl.exp2((raw - top) * to_log2)
            total += tl.where((raw >= lowest) & (raw >= cutoff), mass, 0.0)
        prefix = tl.where(tl.sum(total, 0) >= goal, trial, prefix)
    ordered = prefix << LOW_BIT
    low_ones = tl.full([], (1 << LOW_BIT) - 1, dtype=tl.uint32)
    # A number has zeros below LOW_BIT. Where the encoding flips bits, these are ones.
    smallest = _decode(tl.where(ordered >> 31 == 0, ordered | low_ones, ordered))
    # NaN means that all finite logits together do not reach the goal, so all are kept.
    return tl.where(smallest == smallest, smallest, -float("inf"))


@triton.jit
def _decode(ordered):
    """Return the fp32 number of an encoding.

    The encoding of a positive number has the sign bit set, that of a negative one has all bits
    flipped.
    """
    sign = tl.full([], 1, dtype=tl.uint32) << 31
    bits = tl.where(ordered >= sign, ordered ^ sign, ordered ^ (sign | (sign - 1)))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _id_of_tie(row_logits, vocab_size, value, number, BLOCK: tl.constexpr):
    """Return the id of the `number`-th logit that equals value, in the order of ids."""
    last_tie = -1
    num_seen = 0
    for start in range(0, vocab_size, BLOCK):
        is_tie = (_load(row_logits, start, vocab_size, BLOCK) == value).to(tl.int32)
        ranks = num_seen + tl.cumsum(is_tie, 0)
        is_kept = (is_tie == 1) & (ranks.to(tl.float32) <= number)
        columns = start + tl.arange(0, BLOCK)
        last_tie = tl.maximum(last_tie, tl.max(tl.where(is_kept, columns, -1)))
        num_seen += tl.sum(is_tie, 0)
    return last_tie
