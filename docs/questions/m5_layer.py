"""A token's way through a layer's nine launches: bytes in, bytes out. `-o PATH.png` draws it.

The fused decoder runs one layer of Qwen3-0.6B's shape, and each launcher notes its tensors.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.questions.small_pictures import OWN, PLAIN, arrow, box, finish
from m5_kernels.decoder import attention, decoder, one_gpu, products
from m5_kernels.decoder.config import DecoderConfig, rope_table
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.lab.plots.picture import write_picture
from milestone_llm.models.shapes import shape_config

CONTEXT, ROWS, GB_A_SECOND = 600, 64, 4480
LAUNCHERS: list[tuple[Any, str]] = [
    *((one_gpu, "add_rms_norm"), (F, "linear")),
    *((products, "silu_mul"), (attention, "flash_decode")),
]
PRODUCTS = iter(("QKV", "output", "gate, up", "down"))
RESULTS = ("q, k, v", "q; KV\nto a slot", "heads", "to be\nadded", "residual\nand norm")
RESULTS += ("gate, up", "product", "to be\nadded", "residual\nand norm")


@dataclass
class Launch:
    """Bytes of one launch for one row."""

    name: str
    weights: int = 0
    kv: int = 0
    reads: int = 0
    writes: int = 0


def noted(
    launches: list[Launch], launcher: Callable[..., torch.Tensor], caches: set[int], *args, **kwargs
) -> torch.Tensor:
    """Run a launcher; note its tensors: matrices of weights, KV, what comes in, what goes out."""
    output = launcher(*args, **kwargs)
    is_product = launcher.__name__ == "linear"
    launch = Launch(next(PRODUCTS) if is_product else launcher.__name__, writes=output.nbytes)
    for number, tensor in enumerate(each for each in args if torch.is_tensor(each)):
        if is_product and number == 1:
            launch.weights = tensor.nbytes
        elif id(tensor) in caches:  # of which a row reads its context, and writes one token
            slot = tensor[0, 0].nbytes
            if launch.name == "flash_decode":
                launch.kv += CONTEXT * slot
            else:
                launch.writes += slot
        elif tensor.is_floating_point() and len(tensor) == 1 and tensor is not output:
            launch.reads += tensor.nbytes
    if launch.name == "add_rms_norm":  # the residual stream is changed in place
        launch.writes += output.nbytes
    launches.append(launch)
    return output


def layer() -> list[Launch]:
    """One row through one layer."""
    hf_config = shape_config("qwen3-0.6b")
    config = replace(DecoderConfig.from_hf(hf_config), windows=(None,), vocab_size=16)
    angles = rope_table(hf_config, CONTEXT)
    number = torch.tensor([CONTEXT], dtype=torch.int32)
    num_blocks = -(-CONTEXT // 16)
    metadata = StepMetadata(
        input_ids=torch.tensor([1]),
        output_positions=torch.tensor([1]),
        positions=number - 1,
        slot_mapping=number.long() - 1,
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        context_lens=number,
        query_start_loc=torch.tensor([0, 1]),
        decode_lens=number,
        first_chunk=torch.tensor([1]),
        num_decodes=1,
        num_chunks=0,
    )
    model = decoder.FusedDecoder(config, angles, torch.bfloat16, "cpu")
    caches = model.allocate_caches(num_blocks, 16)
    launches: list[Launch] = []
    watch = partial(partial, noted, launches)
    patches = [
        patch.object(place, name, watch(getattr(place, name), {id(x) for x in caches[0]}))
        for place, name in [*LAUNCHERS, (model, "rope_kv_write")]
    ]
    for each in patches:
        each.start()
    model.forward(metadata.input_ids, metadata, caches, attention.Attention())
    for each in patches:
        each.stop()
    return launches


def size(num_bytes: float) -> str:
    """As people say it."""
    kib = num_bytes / 1024
    return f"{kib / 1024:.1f} MiB" if kib >= 1000 else f"{kib:.0f} KiB"


def draw() -> Figure:
    """Two rows of boxes: attention's half of the layer above, the MLP's below."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    axes = figure.subplots()
    launches, results = layer(), iter(RESULTS)
    for top, half in ((0.0, launches[:5]), (-3.6, launches[5:])):
        axes.add_patch(
            Rectangle((0, top - 2.3), 14.6, 0.5, facecolor="#eeeeee", edgecolor="#333333")
        )
        axes.text(7.3, top - 2.05, "memory of the GPU", ha="center", va="center", fontsize=8.5)
        for place, launch in enumerate(half):
            left = 3.0 * place
            large = launch.weights + launch.kv
            box(axes, left, top, launch.name, OWN if large else PLAIN, 2.6)
            arrow(axes, (left + 0.8, top - 1.8), (left + 0.8, top - 0.4))
            arrow(axes, (left + 1.9, top - 0.4), (left + 1.9, top - 1.8))
            what = "weights" if launch.weights else "KV"
            reads = f"{size(launch.reads)}" + f"\n+ {size(large)}\n{what}" * bool(large)
            look = {"fontsize": 8, "va": "center", "linespacing": 1.1}
            axes.text(left + 0.7, top - 1.1, reads, ha="right", **look)
            writes = f"{size(launch.writes)}\n{next(results)}"
            axes.text(left + 2.0, top - 1.1, writes, ha="left", **look)
    finish(
        axes,
        "A token's way through the nine launches of a layer",
        f"one row, {CONTEXT} tokens of context; blue: reads much. Rows share the weights",
        xlim=(-0.9, 15.3),
        ylim=(-6.1, 0.6),
    )
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", metavar="PATH.png")
    options = parser.parse_args()
    if options.output:
        print("wrote", write_picture(options.output, "picture of a layer", draw))
    else:
        print(
            f"a layer of Qwen3-0.6B's shape in bfloat16; of a row with {CONTEXT} tokens of context"
        )
        print("launch          weights         KV   reads besides   writes")
        for launch in (launches := layer()):
            cells = (launch.weights, launch.kv, launch.reads, launch.writes)
            texts = [size(each) if each else "-" for each in cells]
            print("{:14}{:>9}{:>11}{:>16}{:>9}".format(launch.name, *texts))
        print()
        for rows in (1, ROWS):
            weights = sum(launch.weights for launch in launches)
            kv = rows * sum(launch.kv for launch in launches)
            rest = rows * sum(launch.reads + launch.writes for launch in launches)
            us = (weights + kv + rest) / GB_A_SECOND / 1e3
            what = f"weights {size(weights)}, KV {size(kv)}, the rest {size(rest)}"
            print(f"rows: {rows:2}   {what}: {us:.1f} us at {GB_A_SECOND:,} GB/s")
