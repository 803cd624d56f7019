"""The whole engine with Triton's interpreter running its kernels on the CPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON

PROGRAM = """
    import m4_prefix_chunked, m5_kernels
    from m1_single import SamplingParams
    from milestone_llm.models.tiny_models import build_tiny_model
    from m5_kernels.kernels import backend

    assert backend.INTERPRETED
    model = build_tiny_model("qwen3", num_hidden_layers=1)
    prompts = [[5, 9, 33], [7, 60, 8, 21, 5, 9]]
    params = [
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=2, ignore_eos=True),
    ]
    limits = {"max_num_seqs": 2, "max_model_len": 16, "block_size": 4}
    engines = [p.LLMEngine(model, **limits) for p in (m4_prefix_chunked, m5_kernels)]
    m4, m5 = ([out.token_ids for out in e.generate(prompts, params)] for e in engines)
    assert m5 == m4, (m5, m4)
    print("same tokens:", m5)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_interpreted_kernels_generate_the_tokens_of_m4() -> None:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "same tokens" in result.stdout
