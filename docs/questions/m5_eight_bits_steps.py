"""Decode steps of Qwen3-8B's shape, whole, with weights in bfloat16 and in eight bits.

    python -m docs.questions.m5_eight_bits_steps
    python -m docs.questions.m5_eight_bits_steps --shape qwen3-0.6b --layers 28

A step here is layers and LM head: in a graph, without sampling, each row with 500 tokens. Eight
layers stand for 36: their weights are many times what the L2 cache holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from m5_kernels.decoder.attention import Attention
from m5_kernels.decoder.config import DecoderConfig, rope_table
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.products import Products
from m5_kernels.extras.hopper.products import EarlyStarts, products_of_few_rows
from m5_kernels.extras.int8.products import Int8Matrices, int8_products
from m5_kernels.kernels.early_start import Starts
from m5_kernels.kernels.flash_decode import DecodeWorkspace
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.tools.measure import gpu_command, median_us
from milestone_llm.command.cli import Formatter, console, positive
from milestone_llm.lab.bench.report import table
from milestone_llm.models.shapes import shape_config

CONTEXT, BLOCK = 500, 16
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256)


@torch.inference_mode()
def decoder_of(
    config: PretrainedConfig, num_layers: int, is_int8: bool, device: torch.device
) -> FusedDecoder:
    """Some layers of this shape, in bf16, with random weights."""
    config.num_hidden_layers = num_layers
    config.layer_types = config.layer_types[:num_layers]
    shape, angles = DecoderConfig.from_hf(config), rope_table(config, 2 * CONTEXT)
    if is_int8:
        decoder = FusedDecoder(
            shape, angles, torch.bfloat16, device,
            products=Products(int8_products(device)), matrices=Int8Matrices(),
            starts=Starts(device),
        )  # fmt: skip
    else:
        decoder = FusedDecoder(
            shape, angles, torch.bfloat16, device,
            products=Products(products_of_few_rows(device)), starts=EarlyStarts(device),
        )  # fmt: skip
    decoder.fill_randomly()
    return decoder


@torch.inference_mode()
def decode_step(decoder: FusedDecoder, num_rows: int) -> Callable[[], torch.Tensor]:
    """A step in which each row gets a token: returns the logits, `[num_rows, vocab_size]`."""
    c, device = decoder.config, decoder.embedding.device
    num_blocks = -(-CONTEXT // BLOCK)
    rows = torch.arange(num_rows, device=device)
    lengths = torch.full((num_rows,), CONTEXT, dtype=torch.int32, device=device)
    blocks = torch.arange(num_rows * num_blocks, dtype=torch.int32, device=device)
    tokens = rows % c.vocab_size
    metadata = StepMetadata(
        input_ids=tokens,
        output_positions=tokens[:0],
        positions=lengths.long() - 1,
        slot_mapping=rows * num_blocks * BLOCK + CONTEXT - 1,
        block_table=blocks.view(num_rows, num_blocks),
        context_lens=lengths,
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        decode_lens=lengths,
        first_chunk=lengths.new_tensor([num_rows]),
        num_decodes=num_rows,
        num_chunks=0,
    )
    attend = Attention(
        DecodeWorkspace.allocate(
            num_rows, c.num_q_heads, c.num_kv_heads, c.head_dim, torch.bfloat16, device
        )
    )
    caches = decoder.allocate_caches(num_rows * num_blocks, BLOCK)
    return lambda: decoder.logits(decoder.forward(tokens, metadata, caches, attend))


@torch.inference_mode()
def show(args: argparse.Namespace) -> None:
    """Measure, and print the table."""
    config = shape_config(args.shape)
    gpu = torch.device("cuda", torch.cuda.current_device())
    decoders = [decoder_of(config, args.layers, is_int8, gpu) for is_int8 in (False, True)]
    rows = []
    for num_rows in ROWS:
        bf16, int8 = (median_us([decode_step(each, num_rows)]) for each in decoders)
        times = f"{bf16 / 1e3:.2f}", f"{int8 / 1e3:.2f}", f"{bf16 / int8:.2f}x"
        rows.append([str(num_rows), *times])
    console.print(
        f"{args.shape}'s shape, {args.layers} layers and the LM head, {CONTEXT} tokens a row"
    )
    console.print(table("", ["rows", "bf16, ms", "8 bits, ms", "gain"], rows))


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.questions.m5_eight_bits_steps",
        description=__doc__,
        formatter_class=Formatter,
    )
    parser.add_argument("--shape", default="qwen3-8b", help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=8, metavar="N")
    return gpu_command(parser, show)


if __name__ == "__main__":
    sys.exit(main())
