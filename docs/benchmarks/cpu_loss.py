"""What is lost when SmolLM2 is computed in few bits on a CPU: `python -m docs.benchmarks.cpu_loss`

`docs.questions.m5_eight_bits` tells it of roundings; this, of what an engine computes with: bf16
inputs, and torch's products of them with bf16, with eight bits, and with the words of a GGUF file.
"Exact" are the weights of the file in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from docs.questions.m5_eight_bits import Losses, log_probabilities, windows
from m5_kernels.decoder.config import DecoderConfig, rope_table
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.products import Products
from m5_kernels.extras.cpu import int8
from m5_kernels.extras.cpu.layers import OneCPU, RopeAndWrite
from m5_kernels.extras.cpu.products import OwnProduct, PlainProduct
from m5_kernels.extras.gguf import packed
from m5_kernels.extras.gguf.file import open_gguf
from m5_kernels.extras.gguf.matrices import GGUFMatrices
from m5_kernels.extras.int8.products import Int8Matrices
from milestone_llm.command.cli import console, positive
from milestone_llm.lab.bench.report import table
from milestone_llm.models.checkpoint import load_model

MODEL = "smollm2-135m"


@torch.inference_mode()
def main() -> None:
    """Compare, and print a line for each way to compute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=positive, default=6)
    parser.add_argument("--length", type=positive, default=256, help="tokens of a window")
    args = parser.parse_args()
    packed.MANY_ROWS = int8.MANY_ROWS = args.length + 1  # the products of few rows, for all rows
    loaded = load_model(MODEL, dtype="float32", device="cpu")
    model, length = loaded.model, args.length
    ids = windows(loaded, args.windows, length)
    exact = FusedDecoder.from_hf(model, max_positions=length)
    wanted = [log_probabilities(exact, window) for window in ids]
    config, file = DecoderConfig.from_hf(model.config), open_gguf(MODEL, torch.device("cpu"))

    def decoder(**parts: object) -> FusedDecoder:
        return FusedDecoder(
            config, rope_table(model.config, length), torch.bfloat16, "cpu",
            gpus=OneCPU(), rope_and_write=RopeAndWrite(), **parts,
        )  # fmt: skip

    plain = decoder(products=Products([PlainProduct()]))
    plain.load(iter(model.named_parameters()))
    bytes_ = decoder(
        products=Products([OwnProduct(int8.CPUInt8Weight)]),
        matrices=Int8Matrices(int8.CPUInt8Weight),
    )
    bytes_.load(iter(model.named_parameters()))
    words = decoder(
        products=Products([OwnProduct(packed.PackedMatrix)]), matrices=GGUFMatrices(file)
    )
    words.load(file)
    theirs = load_model(MODEL, dtype="bfloat16", device="cpu").model
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "Hugging Face, bfloat16": lambda window: theirs(window[None]).logits[0],
        "M5, bfloat16": lambda window: log_probabilities(plain, window),
        "M5, the file's bits": lambda window: log_probabilities(words, window),
        "M5, eight bits": lambda window: log_probabilities(bytes_, window),
    }
    rows = []
    for name, way in ways.items():
        losses = Losses()
        for window, log_probs in zip(ids, wanted, strict=True):
            losses.add(way(window).float().log_softmax(-1), log_probs, window)
        rows.append([name, *losses.cells()])
    headings = ["computed by", "perplexity", "mean KL", "99 % of KL", "same top", "RMS of dp"]
    console.print(f"{loaded.name}, {ids.numel():,} tokens in windows of {length}")
    console.print(table("", headings, rows))


if __name__ == "__main__":
    main()
