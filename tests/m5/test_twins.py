"""What logits against Hugging Face's (`test_fused_decoder.py`) do not show of the torch twins."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from m5_kernels.kernels.flash_decode import flash_decode_torch
from m5_kernels.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.tools.measure import PagedBatch


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
