"""What logits against Hugging Face's (`test_fused_decoder.py`) do not show of the torch twins."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from m5_kernels.kernels.flash_decode import flash_decode_torch
from m5_kernels.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from m5_kernels.kernels.sample import sample_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.tools.measure import PagedBatch
from milestone_llm.core.sampling import filter_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_silu_mul_have_the_bits_of_hugging_face(dtype: torch.dtype) -> None:
    norm = Qwen3RMSNorm(40, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    hidden, residual = torch.randn(2, 5, 40).to(dtype)
    assert torch.equal(rms_norm_torch(hidden, norm.weight.data, 1e-5), norm(hidden))
    total = residual + hidden
    output = add_rms_norm_torch(hidden, residual, norm.weight.data, 1e-5)
    assert torch.equal(output, norm(total))
    assert torch.equal(residual, total)
    gate_up = torch.cat((hidden, total), dim=-1)
    torch.testing.assert_close(silu_mul_torch(gate_up), ACT2FN["silu"](hidden) * total)


def test_flash_decode_zeroes_padding() -> None:
    batch = PagedBatch.random([9, 0, 33], [1, 1, 1], 4, 2, 16, 4, torch.float32, "cpu")
    assert flash_decode_torch(*batch.decode_inputs).any((1, 2)).tolist() == [True, False, True]


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
