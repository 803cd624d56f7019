"""The whole engine with Triton's interpreter running its kernels on the CPU."""

from __future__ import annotations

import pytest
import torch

import m4_prefix_chunked
import m5_kernels
from m1_single import SamplingParams
from m5_kernels.kernels import backend
from milestone_llm.models.tiny_models import build_tiny_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
def test_interpreted_kernels_generate_the_tokens_of_m4() -> None:
    assert backend.INTERPRETED
    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48}
    model = build_tiny_model("qwen3", num_hidden_layers=1, **small)
    prompts = [[5, 9, 33], [7, 40, 8, 21, 5, 9]]
    params = [
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=2, ignore_eos=True),
    ]
    limits = {"max_num_seqs": 2, "max_model_len": 16, "block_size": 4}
    engines = [package.LLMEngine(model, **limits) for package in (m4_prefix_chunked, m5_kernels)]
    m4, m5 = ([out.token_ids for out in e.generate(prompts, params)] for e in engines)
    assert m5 == m4
