"""What M5 computes with on a CPU, against the kernels' twins and against plain sums."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from m5_kernels.decoder.attention import Attention, AttentionLayer, AttentionShape
from m5_kernels.extras.devices.cpu_attention import CPUAttention, plan_batches
from m5_kernels.extras.devices.cpu_linear import CPULinear
from m5_kernels.extras.devices.cpu_ops import FEW_ROWS, RopeAndWrite, add_norm, embed_norm
from m5_kernels.extras.quantization.cpu_int8 import MANY_ROWS, CPUInt8Weight, has_int8_product
from m5_kernels.kernels.rms_norm import add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.tools.measure import PagedBatch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


SIZES = AttentionShape(6, 2, 16), 8, torch.float32, torch.device("cpu")
"""Arguments of the attention's constructor, which a CPU does not need."""


def metadata_of(batch: PagedBatch, chunks: list[int]) -> StepMetadata:
    """Of a step whose sequences with one new token come first."""
    num_decodes = sum(chunk == 1 for chunk in chunks)
    num_tokens = sum(chunks)
    decode_lens = batch.context_lens.clone()
    decode_lens[num_decodes:] = 0
    whole = StepMetadata.allocate(num_tokens, len(chunks), batch.block_table.shape[1], "cpu")
    return dataclasses.replace(
        whole,
        context_lens=batch.context_lens,
        decode_lens=decode_lens,
        query_start_loc=batch.query_start_loc,
        block_table=batch.block_table,
        first_chunk=torch.tensor([num_decodes]),
        num_decodes=num_decodes,
        num_chunks=len(chunks) - num_decodes,
    )


@DTYPES
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(
    ("lens", "chunks"),
    [
        ([33], [1]),
        ([40, 3, 41, 36, 1], [1, 1, 1, 1, 1]),  # similar ones together, and out of their order
        ([30, 12, 21], [30, 5, 20]),
        ([9, 50, 30, 12], [1, 1, 30, 5]),
    ],
)
def test_attention(
    lens: list[int], chunks: list[int], window: int | None, dtype: torch.dtype
) -> None:
    sinks = torch.linspace(-1, 3, 6) if window == 7 else None
    batch = PagedBatch.random(lens, chunks, 6, 2, 16, 4, dtype, "cpu")
    metadata = metadata_of(batch, chunks)
    layer = AttentionLayer(0, window, sinks=sinks)
    arguments = batch.query, batch.key_cache, batch.value_cache, metadata, layer
    twin, attend = Attention(*SIZES), CPUAttention(*SIZES)
    close(attend(*arguments), twin(*arguments))
    # A step's plan is not the next one's.
    later = metadata_of(batch, chunks)
    later.decode_lens[:1].clamp_(max=2)
    arguments = *arguments[:3], later, layer
    close(attend(*arguments), twin(*arguments))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("chunk", [1, 5])
def test_blocks_that_are_neighbours_are_read_where_they_lie(chunk: int, window: int | None) -> None:
    batch = PagedBatch.random([22], [chunk], 6, 2, 16, 4, torch.float32, "cpu")
    batch.block_table.copy_(batch.block_table.sort().values)
    for cache in (batch.key_cache, batch.value_cache):
        cache.nan_to_num_()  # what no token had written lies elsewhere now
    metadata = metadata_of(batch, [chunk])
    assert isinstance(plan_batches(metadata, batch.key_cache.shape, window)[0].slots, int)
    layer = AttentionLayer(0, window)
    arguments = batch.query, batch.key_cache, batch.value_cache, metadata, layer
    found, wanted = CPUAttention(*SIZES)(*arguments), Attention(*SIZES)(*arguments)
    torch.testing.assert_close(found, wanted)


@DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_and_kv_write(has_norms: bool, dtype: torch.dtype) -> None:
    num_q, num_kv, head_dim, num_tokens = 6, 2, 16, 5
    norms: list[Any] = [torch.rand(head_dim).to(dtype) if has_norms else None for _ in range(2)]
    cos_sin = torch.randn(40, head_dim)
    rotate = RopeAndWrite()
    for slots in ([3, 9, 0, 30, 11], [5, -1, 7, 2, -1]):  # -1: padding
        qkv = torch.randn(num_tokens, (num_q + 2 * num_kv) * head_dim).to(dtype)
        positions = torch.randint(0, 40, (num_tokens,), dtype=torch.int32)
        results = []
        functions: list[Any] = [rope_kv_write_torch, rotate]
        for function in functions:
            keys, values = (torch.full((8, 4, num_kv, head_dim), -7.0).to(dtype) for _ in "kv")
            query = function(
                qkv.clone(), keys, values, torch.tensor(slots), num_q, positions, cos_sin,
                *norms, 1e-5,
            )  # fmt: skip
            results.append((query, keys, values))
        kept = torch.tensor(slots) >= 0
        for wanted, result in zip(*results, strict=True):
            if len(wanted) == num_tokens:
                wanted, result = wanted[kept], result[kept]
            close(result, wanted)


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, FEW_ROWS, FEW_ROWS + 1])
def test_norm_and_gate(num_tokens: int, dtype: torch.dtype) -> None:
    embedding, weight = torch.randn(40, 70).to(dtype), torch.randn(70).to(dtype)
    ids = torch.randint(0, 40, (num_tokens,), dtype=torch.int32)
    residual, normed = embed_norm(ids, ids, embedding, weight, 1e-5)
    wanted = embedding[ids]
    nothing = torch.zeros_like(wanted)
    close(normed, add_rms_norm_torch(nothing, wanted, weight, 1e-5))
    for part in torch.randn(2, num_tokens, 70).to(dtype):  # in place: the second sees the first
        close(
            add_norm(part, residual, weight, 1e-5), add_rms_norm_torch(part, wanted, weight, 1e-5)
        )
    hidden, matrix = torch.randn(num_tokens, 70).to(dtype), torch.randn(20, 70).to(dtype)
    gated = CPULinear().gate_up(hidden, matrix)
    close(gated, silu_mul_torch(F.linear(hidden, matrix)))


@DTYPES
@pytest.mark.parametrize("in_size", [96, 65])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_products_with_eight_bits(num_tokens: int, in_size: int, dtype: torch.dtype) -> None:
    assert 5 < MANY_ROWS < 40
    matrix = torch.randn(97, in_size).to(dtype)
    matrix[3] = 0
    weight = CPUInt8Weight.zeros(97, in_size, "cpu")
    weight.round_from(matrix)
    numbers = weight.integers.double() * weight.scale.double()[:, None]
    steps = matrix.float().abs().amax(1) / 127
    assert ((numbers - matrix).abs().amax(1) <= steps * 0.51).all()
    if dtype == torch.bfloat16:
        assert torch.equal(weight.scale.bfloat16().float(), weight.scale)
    hidden, bias = torch.randn(num_tokens, in_size).to(dtype), torch.randn(97).to(dtype)
    wanted = F.linear(hidden.double(), numbers, bias.double())
    error = (weight.product(hidden, bias) - wanted).norm() / wanted.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_products_do_without_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = CPUInt8Weight.zeros(16, 32, "cpu")
    weight.round_from(torch.randn(16, 32).bfloat16())
    hidden = torch.randn(2, 32).bfloat16()
    wanted = weight.product(hidden)
    has_int8_product.cache_clear()
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    try:
        torch.testing.assert_close(weight.product(hidden), wanted, rtol=2e-2, atol=2e-2)
        assert not has_int8_product()
    finally:
        has_int8_product.cache_clear()
