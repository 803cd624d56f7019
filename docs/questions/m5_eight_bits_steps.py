"""Decode steps of Qwen3-8B's shape, whole, with weights in bfloat16 and in eight bits.

    python -m docs.questions.m5_eight_bits_steps             what was measured on one H200
    python -m docs.questions.m5_eight_bits_steps --measure   on a GPU: anew, or another shape

A step here is layers and LM head: in a graph, without sampling, each row with 500 tokens. Eight
layers stand for 36: their weights are many times what the L2 cache holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from m5_kernels.decoder.attention import AttentionMetadata
from m5_kernels.decoder.config import DecoderConfig, rope_table
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.kernels.decode_parts import DecodeWorkspace
from m5_kernels.tools.measure import median_us
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.cli import add_options, console, positive, run_command
from milestone_llm.models.shapes import shape_config

SHAPE, NUM_LAYERS, CONTEXT, BLOCK = "qwen3-8b", 8, 500, 16
MEASURED = {
    8: (1297.0, 832.1),
    16: (1352.3, 883.6),
    32: (1508.8, 979.2),
    64: (1657.8, 1201.7),
    96: (1865.4, 1667.7),
    128: (2006.2, 1726.8),
    160: (2229.2, 2269.4),
    192: (2464.9, 2545.7),
    256: (2961.9, 3023.2),
}
"""By rows: microseconds in bfloat16, and in eight bits. One NVIDIA H200, torch 2.11, triton 3.6."""


@torch.inference_mode()
def decoder_of(
    config: PretrainedConfig, num_layers: int, quantization: str | None, device: str
) -> FusedDecoder:
    """Some layers of this shape, in bf16, with random weights."""
    config.num_hidden_layers = num_layers
    config.layer_types = config.layer_types[:num_layers]
    shape, angles = DecoderConfig.from_hf(config), rope_table(config, 2 * CONTEXT)
    decoder = FusedDecoder(shape, angles, torch.bfloat16, device, quantization=quantization)
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
    metadata = AttentionMetadata(
        positions=lengths.long() - 1,
        slot_mapping=rows * num_blocks * BLOCK + CONTEXT - 1,
        block_table=blocks.view(num_rows, num_blocks),
        context_lens=lengths,
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        decode_lens=lengths,
        first_chunk=lengths.new_tensor([num_rows]),
        num_decodes=num_rows,
        num_chunks=0,
        workspace=DecodeWorkspace.allocate(
            num_rows, c.num_q_heads, c.num_kv_heads, c.head_dim, torch.bfloat16, device
        ),
    )
    caches = decoder.allocate_caches(num_rows * num_blocks, BLOCK)
    tokens = rows % c.vocab_size
    return lambda: decoder.logits(decoder.forward(tokens, metadata, caches))


@torch.inference_mode()
def measure(shape: str, num_layers: int) -> dict[int, tuple[float, float]]:
    """What `MEASURED` holds, on this GPU."""
    config = shape_config(shape)
    decoders = [decoder_of(config, num_layers, each, "cuda") for each in (None, "int8")]
    return {
        num_rows: (
            median_us([decode_step(decoders[0], num_rows)]),
            median_us([decode_step(decoders[1], num_rows)]),
        )
        for num_rows in MEASURED
    }


def show(args: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        InputError: it is to be measured, and there is no GPU; or it was not, and is asked for.
    """
    if args.measure and not torch.cuda.is_available():
        raise InputError("this measures steps on an NVIDIA GPU, and torch sees none here")
    if not args.measure and (args.shape, args.layers) != (SHAPE, NUM_LAYERS):
        raise InputError(f"only {NUM_LAYERS} layers of {SHAPE} were measured: add --measure")
    found = measure(args.shape, args.layers) if args.measure else MEASURED
    rows = [
        [str(num_rows), f"{bf16 / 1e3:.2f}", f"{int8 / 1e3:.2f}", f"{bf16 / int8:.2f}x"]
        for num_rows, (bf16, int8) in found.items()
    ]
    console.print(
        f"{args.shape}'s shape, {args.layers} layers and the LM head, {CONTEXT} tokens a row"
    )
    console.print(table("", ["rows", "bf16, ms", "8 bits, ms", "gain"], rows))


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.questions.m5_eight_bits_steps", description=__doc__
    )
    parser.add_argument("--measure", action="store_true", help="on this GPU")
    parser.add_argument("--shape", default=SHAPE, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=NUM_LAYERS, metavar="N")
    add_options(parser, "threads")
    return run_command(show, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
