"""How fast is attention of prompts, in Triton, in Gluon for Hopper, and over keys without pages?

TFLOP/s of causal attention, which is half of the score matrix, against a large matrix product of
the same run. Both kernels are compared with the twin on the inputs that are timed; B16xL1024 are 16
prompts of 1,024 tokens, and `-half` is the second half of one, behind a first half in the cache.
"No pages" is cuDNN. Needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from m5_kernels.extras.hopper.prefill_tiles import runs_on_hopper
from m5_kernels.kernels.tiles import prefill_tile
from m5_kernels.tools.attention_work import (
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    PREFILL_SHAPES,
    Shape,
    microseconds,
)
from m5_kernels.tools.kernel_bench import HEAD_DIM
from m5_kernels.tools.measure import Ceilings, median_us
from milestone_llm.command.cli import console
from milestone_llm.lab.bench.report import table

SHAPES = [*PREFILL_SHAPES, Shape(8, 2048, 2048), Shape(32, 512, 512), Shape(1, 32768, 16384)]
FA3 = dict(zip(PREFILL_SHAPES, ("388", "571", "616"), strict=True))
"""FlashAttention-3 with these shapes and block size on an H200, measured once."""


def dense_us(shape: Shape) -> float:
    """cuDNN's attention over keys that lie side by side."""
    q, k, v = (
        torch.randn(shape.num_seqs, heads, shape.context_len, HEAD_DIM, device="cuda").bfloat16()
        for heads in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )

    def launch() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return median_us([launch])


def rows(ceilings: Ceilings) -> Iterator[list[str]]:
    """A row of each shape."""
    device = torch.device("cuda", torch.cuda.current_device())
    tiles = [prefill_tile(HEAD_DIM, torch.bfloat16, device), None]
    tiles = tiles[: 1 + runs_on_hopper(device, torch.bfloat16, HEAD_DIM, block_size=16)]
    for shape in SHAPES:
        speeds = [shape.speed(HEAD_DIM, us) for us in microseconds(shape, HEAD_DIM, tiles)]
        cells = [f"{speed:.0f}" for speed in speeds] + ["-"] * (2 - len(speeds))
        is_whole = shape.query_len == shape.context_len
        dense = f"{shape.speed(HEAD_DIM, dense_us(shape)):.0f}" if is_whole else "-"
        share = f"{speeds[-1] / ceilings.matmul_tflops:.0%}"
        name = shape.name if is_whole else f"{shape.name}-half"
        yield [name, *cells, share, dense, FA3.get(shape, "-")]
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("This measures kernels and needs an NVIDIA GPU; torch.cuda finds none here.")
    found = Ceilings.measure()
    console.print(str(found), soft_wrap=True)
    headings = "TFLOP/s, block 16|paged_prefill|hopper_prefill|of matmul|no pages|FA3"
    console.print()
    console.print(table("", headings.split("|"), rows(found)))
