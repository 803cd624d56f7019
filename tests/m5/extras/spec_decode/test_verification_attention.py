"""Attention of guesses with their request against the twin of Flash-Decoding, which has no guesses.

Any number of guesses, heads and windows; what no token was written to holds nonsense.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from m5_kernels.extras.spec_decode.verification_attention import (
    attend_drafts,
    verification_workspace,
)
from m5_kernels.kernels.flash_decode import flash_decode_torch
from m5_kernels.tools.measure import PagedBatch, relative_error

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 1), (3, 2), (4, 1), (16, 1)])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (20, False), (20, True)])
def test_guesses_attend_with_their_request(
    group: int, num_kv_heads: int, window: int | None, has_sinks: bool, device: str
) -> None:
    lens, num_drafts = [60, 31, 16, 1], [3, 0, 5, 20]
    check_guesses(lens, num_drafts, window, group, num_kv_heads, 32, device, has_sinks=has_sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("window", [None, 500])
def test_many_guesses_of_long_contexts(group: int, window: int | None) -> None:
    lens = [5000, 1, 127, 900, 1023, 64, 2000, 30000]
    num_drafts, dtype, has_sinks = [3, 7, 1, 0, 3, 15, 3, 3], torch.bfloat16, window is not None
    check_guesses(lens, num_drafts, window, group, 2, 128, "cuda", dtype, has_sinks)


def check_guesses(
    lens: list[int],
    num_drafts: list[int],
    window: int | None,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    has_sinks: bool = False,
) -> None:
    """Places of requests side by side; of every other one the last guess was not to be made."""
    longest = [length + guesses for length, guesses in zip(lens, num_drafts, strict=True)]
    batch = PagedBatch.random(
        longest, [1] * len(lens), group * num_kv_heads, num_kv_heads, head_dim, 16, dtype, device
    )
    tables, context_lens, offsets = [], [], []
    for seq, (length, guesses) in enumerate(zip(lens, num_drafts, strict=True)):
        for offset in range(1 + guesses):
            is_missing = offset == guesses and guesses and seq % 2 == 0
            context_lens.append(0 if is_missing else length + offset)
            offsets.append(offset)
            tables.append(batch.block_table[seq].clone())
            tables[-1][-(-(length + offset) // 16) :] = 2**30
    number = len(offsets)
    query = torch.randn(number, group * num_kv_heads, head_dim, dtype=dtype, device=device)
    numbers = torch.tensor([context_lens, offsets], dtype=torch.int32, device=device)
    arguments = (query, batch.key_cache, batch.value_cache, torch.stack(tables), numbers[0])
    workspace = verification_workspace(
        number, group * num_kv_heads, num_kv_heads, head_dim, dtype, torch.device(device)
    )
    if device == "cpu":  # smaller tiles, so that there is something to share out
        workspace = replace(workspace, tile=workspace.tile._replace(tokens=16))
    workspace.partial_output.fill_(torch.nan)
    workspace.partial_lse.fill_(torch.nan)
    output = torch.full_like(query, torch.nan)
    options: dict[str, Any] = {
        "window": window,
        "sinks": torch.linspace(9, -1, query.shape[1], device=device) if has_sinks else None,
    }
    attend_drafts(*arguments, numbers[1], output=output, workspace=workspace, **options)
    assert relative_error(output, flash_decode_torch(*arguments, **options)) < MAX_ERROR[dtype]
    assert not workspace.arrivals.any()
