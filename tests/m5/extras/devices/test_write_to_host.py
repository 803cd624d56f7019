"""Numbers that a kernel writes to the host."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.extras.devices.write_to_host import write_to_host


@pytest.mark.parametrize("length", [0, 1, 17, 1024, 3000])
def test_they_are_there_and_nothing_else_is(length: int, device: str) -> None:
    source = torch.randint(-3, 150_000, (length,), dtype=torch.int32, device=device)
    memory = torch.full((length + 1,), -77, dtype=torch.int32, pin_memory=device == "cuda")
    write_to_host(source, memory[:length])
    if device == "cuda":
        torch.cuda.synchronize()
    assert memory.tolist() == [*source.tolist(), -77]
