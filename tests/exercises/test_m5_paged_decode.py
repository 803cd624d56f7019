"""Checks exercises/m5_paged_decode.py, compiled on a GPU or under Triton's interpreter.

The interpreter must be chosen before anything imports triton. So this file runs in a process with
TRITON_INTERPRET=1: `conftest.py` starts one for whoever names this file, and
tests/m5/test_interpreted_kernels.py for a run of all tests, with the reader's kernel once it is
begun.
"""

import os

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON, tl, triton
from m5_kernels.kernels.flash_decode import flash_decode_torch

EXERCISE = ("m5_paged_decode.py", "paged_decode")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    pytest.mark.skipif(
        not HAS_TRITON or not (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"),
        reason="runs in a process of its own, under Triton's interpreter",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of lanes that are masked out
]

CONTEXTS = [1, 3, 5, 9]
SHAPES = {  # num_heads, num_kv_heads, head_dim, block_size
    "no groups": (1, 1, 16, 4),
    "groups of two": (4, 2, 16, 4),
    "larger blocks": (4, 1, 32, 8),
}


def inputs(shape, contexts, scale=1.0, dtype=torch.float32):
    """Random tensors whose blocks lie anywhere. What no sequence owns is NaN."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    generator = torch.Generator().manual_seed(len(contexts))
    num_blocks = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator, dtype=torch.int32)
    table = torch.zeros(len(contexts), max(num_blocks), dtype=torch.int32)
    size = len(order), block_size, num_kv_heads, head_dim
    keys, values = (torch.full(size, float("nan")) for _ in range(2))
    for seq, (count, context) in enumerate(zip(num_blocks, contexts, strict=True)):
        table[seq, :count], order = order[:count], order[count:]
        for tensor in (keys, values):
            for position in range(context):
                place = table[seq, position // block_size], position % block_size
                tensor[place] = torch.randn(num_kv_heads, head_dim, generator=generator)
    query = torch.randn(len(contexts), num_heads, head_dim, generator=generator) * scale
    lens = torch.tensor(contexts, dtype=torch.int32)
    floats = [tensor.to(DEVICE, dtype) for tensor in (query, keys, values)]
    return *floats, table.to(DEVICE), lens.to(DEVICE)


def wrong_seqs(paged_decode, arguments, tolerance=1e-4):
    """Which sequences are wrong, and the result."""
    output = paged_decode(*arguments).float()
    wanted = flash_decode_torch(*arguments).float()
    is_right = torch.isclose(output, wanted, rtol=tolerance, atol=tolerance).flatten(1).all(1)
    return (~is_right).nonzero()[:, 0].tolist(), output


def check_shape(paged_decode, shape, scale=1.0):
    num_heads, num_kv_heads, _, block_size = SHAPES[shape]
    wrong, output = wrong_seqs(paged_decode, inputs(SHAPES[shape], CONTEXTS, scale))
    if not wrong:
        return
    lens = [CONTEXTS[seq] for seq in wrong]
    where = f"{shape}, blocks of {block_size}: sequences of {lens} tokens are wrong"
    if min(lens) > block_size:
        raise AssertionError(
            f"{where}, and those of one block are right. So it goes wrong with the second block: "
            "is its id read from the table? Are row_sum and accumulator rescaled when the maximum "
            "grows?"
        )
    if output[wrong].isnan().any():
        raise AssertionError(
            f"{where}: they hold a NaN. What lies behind the last token may be anything: load it "
            "as 0 (mask=..., other=0.0), both keys and values, and give it a score of -inf."
        )
    raise AssertionError(
        f"{where}, even within one block"
        + ("; query heads that share a key head are head // group" * (num_heads > num_kv_heads))
        + ". Compare one sequence with the twin: scores, their scale, softmax, sum over values."
    )


def check_padding(paged_decode):
    _, output = wrong_seqs(paged_decode, inputs(SHAPES["groups of two"], [5, 0, 3]))
    assert (output[1] == 0).all(), "a row of padding (context_len 0) should give zeros; " + (
        "0 / 0 is NaN" if output[1].isnan().any() else "yours gives something else"
    )


def num_right(paged_decode):
    wrong, _ = wrong_seqs(paged_decode, inputs(SHAPES["groups of two"], CONTEXTS))
    return len(CONTEXTS) - len(wrong)


def mistaken(mistake):
    """The kernel with a mistake, or without (None)."""

    def paged_decode(query, key_cache, value_cache, block_table, context_lens):
        output = torch.empty_like(query)
        _mistaken_kernel[tuple(query.shape[:2])](
            query, key_cache, value_cache, block_table, context_lens, output,
            query.shape[2] ** -0.5, block_table.stride(0),
            NUM_HEADS=query.shape[1],
            NUM_KV_HEADS=key_cache.shape[2],
            HEAD_DIM=query.shape[2],
            BLOCK_SIZE=key_cache.shape[1],
            MISTAKE=mistake or "",
        )  # fmt: skip
        return output

    return paged_decode


@triton.jit
def _mistaken_kernel(
    query, key_cache, value_cache, block_table, context_lens, output,
    scale, table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MISTAKE: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    dims, offsets = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    if MISTAKE == "alternating heads":
        kv_head = head % NUM_KV_HEADS
    place = (seq * NUM_HEADS + head) * HEAD_DIM + dims
    q = tl.load(query + place).to(tl.float32)
    context_len = tl.load(context_lens + seq)
    row_max, row_sum = -1.0e30, 0.0
    accumulator = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for index in range(0, tl.cdiv(context_len, BLOCK_SIZE)):
        if MISTAKE == "neighbours":
            block = tl.load(block_table + seq * table_stride) + index
        else:
            block = tl.load(block_table + seq * table_stride + index)
        is_real = index * BLOCK_SIZE + offsets < context_len
        if MISTAKE == "no mask":
            is_real = offsets >= 0
        rows = ((block * BLOCK_SIZE + offsets) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        tile = rows[:, None] + dims[None, :]
        keys = tl.load(key_cache + tile, mask=is_real[:, None], other=0.0).to(tl.float32)
        values = tl.load(value_cache + tile, mask=is_real[:, None], other=0.0).to(tl.float32)
        scores = tl.where(is_real, tl.sum(keys * q[None, :], 1) * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        weights, rescale = tl.exp(scores - new_max), tl.exp(row_max - new_max)
        if MISTAKE == "no rescaling":
            rescale = 1.0
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * values, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    if MISTAKE != "no care of padding":
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(output + place, (accumulator / row_sum).to(output.dtype.element_ty))


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_of_all_lengths(exercise, shape):
    check_shape(exercise, shape)


def test_large_scores(exercise):
    check_shape(exercise, "groups of two", scale=100.0)


def test_padding_gives_zeros(exercise):
    check_padding(exercise)


def test_the_table_decides_where_keys_lie(exercise, figure):
    right, total = num_right(exercise), len(CONTEXTS)
    before = num_right(mistaken("neighbours"))
    figure("right sequences", f"{right} of {total}", f"{before} (blocks taken for neighbours)")
    assert right == total


@pytest.mark.gpu
def test_a_large_step_on_a_gpu(exercise, figure):
    arguments = inputs((16, 8, 128, 16), [1024] * 8, dtype=torch.bfloat16)
    wrong, _ = wrong_seqs(exercise, arguments, tolerance=2e-2)
    assert not wrong, f"sequences {wrong} of 1,024 tokens are wrong in bfloat16"
    own, gather = (
        triton.testing.do_bench(lambda f=function: f(*arguments)) * 1e3
        for function in (exercise, flash_decode_torch)
    )
    figure("microseconds for 8 sequences of 1,024", f"{own:,.0f}", f"{gather:,.0f} (torch)")


def test_the_checks_accept_the_right_kernel():
    check_shape(mistaken(None), "groups of two")
    check_padding(mistaken(None))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("neighbours", "is its id read from the table"),
        ("no rescaling", "Are row_sum and accumulator rescaled"),
        ("no mask", "What lies behind the last token may be anything"),
        ("alternating heads", "query heads that share a key head are head // group"),
    ],
)
def test_a_mistake_is_told(mistake, words):
    scale = 20.0 if mistake == "no rescaling" else 1.0
    with pytest.raises(AssertionError, match=words):
        check_shape(mistaken(mistake), "groups of two", scale)


def test_a_padding_row_divided_by_nothing_is_told():
    with pytest.raises(AssertionError, match="0 / 0 is NaN"):
        check_padding(mistaken("no care of padding"))
