"""The torch twins against code that is not ours: torch's attention, Hugging Face's modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from m5_kernels.decoder.config import rope_table
from m5_kernels.kernels.flash_decode import flash_decode_torch
from m5_kernels.kernels.paged_prefill import paged_prefill_torch
from m5_kernels.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write_torch
from m5_kernels.kernels.sample import sample_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.tools.measure import PagedBatch
from milestone_llm.core.sampling import filter_logits

HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def contiguous_kv(batch: PagedBatch, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence, `[num_kv_heads, context_len, head_dim]`, token by token."""
    block_size = batch.key_cache.shape[1]
    pairs = [
        (int(batch.block_table[seq, token // block_size]), token % block_size)
        for token in range(int(batch.context_lens[seq]))
    ]
    keys, values = (
        torch.stack([cache[block, offset] for block, offset in pairs], dim=1)
        for cache in (batch.key_cache, batch.value_cache)
    )
    return keys, values


@pytest.mark.parametrize("window", [None, 7])
def test_paged_prefill_equals_sdpa(window: int | None) -> None:
    lens, chunks = [30, 12, 21], [30, 5, 1]
    batch = PagedBatch.random(lens, chunks, 6, 2, 16, 4, torch.float32, "cpu")
    output = paged_prefill_torch(
        batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.context_lens,
        batch.query_start_loc, window=window,
    )  # fmt: skip
    for seq, query in enumerate(batch.query.split(chunks)):
        keys, values = contiguous_kv(batch, seq)
        rows = torch.arange(lens[seq] - chunks[seq], lens[seq])[:, None]
        columns = torch.arange(lens[seq])[None, :]
        mask = (columns <= rows) & (columns > rows - (window or 1000))
        expected = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], mask, enable_gqa=True
        )[0].transpose(0, 1)
        own = output[int(batch.query_start_loc[seq]) :][: chunks[seq]]
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_flash_decode_equals_sdpa_and_zeroes_padding() -> None:
    lens = [9, 0, 33]
    batch = PagedBatch.random(lens, [1, 1, 1], 4, 2, 16, 4, torch.float32, "cpu")
    output = flash_decode_torch(
        batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.context_lens,
        scale=0.3,
    )  # fmt: skip
    assert not output[1].any()
    for seq in (0, 2):
        keys, values = contiguous_kv(batch, seq)
        query = batch.query[seq][:, None]
        expected = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], scale=0.3, enable_gqa=True
        )[0, :, 0]
        torch.testing.assert_close(output[seq], expected, rtol=1e-5, atol=1e-5)


@HALF
def test_rms_norm_equals_hugging_face(dtype: torch.dtype) -> None:
    norm = Qwen3RMSNorm(40, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    hidden, residual = torch.randn(2, 5, 40).to(dtype)
    assert torch.equal(rms_norm_torch(hidden, norm.weight.data, 1e-5), norm(hidden))
    total = residual + hidden
    output = add_rms_norm_torch(hidden, residual, norm.weight.data, 1e-5)
    assert torch.equal(output, norm(total))
    assert torch.equal(residual, total)


@HALF
def test_silu_mul_equals_hugging_face(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 40).to(dtype)
    expected = ACT2FN["silu"](gate) * up
    torch.testing.assert_close(silu_mul_torch(torch.cat((gate, up), dim=-1)), expected)


def test_rope_and_kv_write_equal_hugging_face() -> None:
    config = AutoConfig.for_model(
        "qwen3", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    norms = [Qwen3RMSNorm(16, eps=1e-6) for _ in "qk"]
    for norm in norms:
        norm.weight.data.normal_()
    qkv, positions = torch.randn(6, 8 * 16), torch.tensor([3, 4, 5, 90, 0, 7])
    query, key, value = qkv.clone().unflatten(1, (8, 16)).split((4, 2, 2), dim=1)
    cos, sin = LlamaRotaryEmbedding(config)(qkv, positions[None])
    normed = [norm(x).transpose(0, 1)[None] for norm, x in zip(norms, (query, key), strict=True)]
    expected = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*normed, cos, sin)]
    caches = [torch.zeros(3, 4, 2, 16) for _ in "kv"]
    slots = torch.tensor([5, 6, 7, 11, -1, 0])
    output = rope_kv_write_torch(
        qkv, *caches, slots, 4, positions, rope_table(config, 100),
        norms[0].weight.data, norms[1].weight.data,
    )  # fmt: skip
    torch.testing.assert_close(output, expected[0])
    kept = slots >= 0
    for cache, written in zip(caches, (expected[1], value), strict=True):
        torch.testing.assert_close(cache.flatten(0, 1)[slots[kept]], written[kept])
        assert cache.any(-1).any(-1).sum() == 5, "a slot that was not named is written"


def test_sampled_tokens_are_spread_like_the_filtered_softmax() -> None:
    num_rows = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0]).expand(num_rows, -1)
    top_k, top_p, min_p = (torch.full((num_rows,), x) for x in (5, 0.95, 0.02))
    tokens = sample_torch(
        logits, torch.arange(num_rows), torch.full((num_rows,), 1.5), top_k, top_p, min_p,
        seeds=torch.arange(num_rows), positions=torch.zeros(num_rows),
    )  # fmt: skip
    kept = filter_logits(
        logits[:1] / 1.5, torch.tensor([5]), torch.tensor([0.95]), torch.tensor([0.02])
    )
    counts = torch.bincount(tokens.long(), minlength=6) / num_rows
    torch.testing.assert_close(counts, kept[0].softmax(-1), rtol=0, atol=0.015)
