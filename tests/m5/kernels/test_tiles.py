"""Tiles by what a GPU has: an H200 keeps what was tuned on it, others get what fits."""

from types import SimpleNamespace

import pytest
import torch

from m5_kernels.kernels.gpu_tiles import (
    GPU,
    MAX_REGISTERS,
    SCRATCH_BYTES,
    decode_tile,
    prefill_tile,
)
from m5_kernels.kernels.tiles import DecodeTile, PrefillTile

KIB = 1024
GPUS = {  # shared memory of a program (with opt-in) and of a multiprocessor, registers, warp
    "H200": GPU(227 * KIB, 228 * KIB, 65536, 32),
    "A100": GPU(163 * KIB, 164 * KIB, 65536, 32),
    "RTX 4090": GPU(99 * KIB, 100 * KIB, 65536, 32),
    "T4": GPU(64 * KIB, 64 * KIB, 65536, 32),
    "MI300X": GPU(64 * KIB, 64 * KIB, 131072, 64),
}


@pytest.fixture
def on(monkeypatch):
    """Tiles of a GPU that is not there, by its figures; its name says nothing."""

    def tiles_on(name, head_dim, dtype):
        gpu = GPUS[name]
        properties = SimpleNamespace(
            name="some GPU",
            shared_memory_per_block=min(48 * KIB, gpu.shared_bytes),
            shared_memory_per_block_optin=gpu.shared_bytes,
            shared_memory_per_multiprocessor=gpu.shared_bytes_per_sm,
            regs_per_multiprocessor=gpu.num_registers,
            warp_size=gpu.warp_size,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        device = torch.device("cuda", 0)
        # Beside the caches: they would remember the GPU of the test before.
        choose = (decode_tile.__wrapped__, prefill_tile.__wrapped__)
        return tuple(each(head_dim, dtype, device) for each in choose)

    return tiles_on


def test_an_h200_keeps_its_tiles_and_less_shared_memory_gives_smaller_ones(on):
    whole = DecodeTile(64, 2, 2, 4), PrefillTile(128, 128, 8, 2)
    assert on("H200", 128, torch.bfloat16) == whole
    assert on("A100", 128, torch.bfloat16)[0] == whole[0]
    less, least = on("RTX 4090", 128, torch.bfloat16), on("T4", 128, torch.bfloat16)
    assert less == (DecodeTile(64, 2, 2, 2), PrefillTile(128, 64, 8, 2))
    assert least == on("MI300X", 128, torch.bfloat16)
    assert least == (DecodeTile(32, 2, 2, 3), PrefillTile(64, 32, 4, 2))


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_tiles_fit(on, name, dtype, head_dim):
    gpu, size = GPUS[name], dtype.itemsize
    decode, prefill = on(name, head_dim, dtype)
    stages = decode.num_stages * 2 * decode.tokens * head_dim * size
    assert stages + SCRATCH_BYTES <= gpu.shared_bytes
    assert 1 <= decode.programs_per_sm <= 4
    vectors = prefill.rows + 2 * prefill.num_stages * prefill.tokens
    assert vectors * head_dim * size + SCRATCH_BYTES <= gpu.shared_bytes
    threads = prefill.num_warps * gpu.warp_size
    assert prefill.rows * (head_dim + prefill.tokens) <= MAX_REGISTERS * threads
    assert threads <= 1024
    for number in (decode.tokens, prefill.rows, prefill.tokens):
        assert number >= 16, "tl.dot wants 16 at least"
        assert number & (number - 1) == 0, "a tile's sides are powers of two"
