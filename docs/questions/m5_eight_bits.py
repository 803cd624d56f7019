"""What a model loses when its weights get eight bits: `python -m docs.questions.m5_eight_bits`

The text is Python's own manual, as `pydoc_data` carries it. The same windows of it go through the
fused decoder with all weights in float32, and with matrices rounded in several ways; each token is
predicted from those before it. Takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pydoc_data.topics import topics

import torch
from transformers import PreTrainedModel

from m5_kernels.decoder.attention import Attention
from m5_kernels.decoder.config import DecoderConfig, rope_table
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.products import Products
from m5_kernels.extras.int8.products import Int8Matrices, int8_products
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.command.cli import console, positive
from milestone_llm.lab.bench.report import table
from milestone_llm.models.checkpoint import LoadedModel, load_model

Rounding = Callable[[torch.Tensor], torch.Tensor]

TOPICS = ("objects", "execmodel", "types", "import")
BLOCK_SIZE = 16


def windows(loaded: LoadedModel, num_windows: int, length: int) -> torch.Tensor:
    """Token ids `[num_windows, length]` from the beginning of the text."""
    text = "\n".join(topics[name] for name in TOPICS if name in topics)
    ids = loaded.tokenizer(text)["input_ids"][: num_windows * length]
    return torch.tensor(ids).view(-1, length)


def log_probabilities(decoder: FusedDecoder, ids: torch.Tensor) -> torch.Tensor:
    """Of all tokens after each token of a window, `[length, vocab_size]`: one step, one prompt."""
    length = len(ids)
    num_blocks = -(-length // BLOCK_SIZE)
    metadata = StepMetadata(
        input_ids=ids,
        output_positions=ids[:0],
        positions=torch.arange(length),
        slot_mapping=torch.arange(length),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        context_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        decode_lens=torch.tensor([0], dtype=torch.int32),
        first_chunk=torch.tensor([0], dtype=torch.int32),
        num_decodes=0,
        num_chunks=1,
    )
    caches = decoder.allocate_caches(num_blocks, BLOCK_SIZE)
    return decoder.logits(decoder.forward(ids, metadata, caches, Attention())).log_softmax(-1)


class Losses:
    """How far predictions are from those of the exact weights, over all tokens seen."""

    def __init__(self) -> None:
        self.of_text: list[torch.Tensor] = []
        self.divergence: list[torch.Tensor] = []
        self.same_top: list[torch.Tensor] = []
        self.change: list[torch.Tensor] = []

    def add(self, found: torch.Tensor, exact: torch.Tensor, ids: torch.Tensor) -> None:
        """Compare the predictions of a window; the last has no token to be judged by."""
        found, exact, following = found[:-1], exact[:-1], ids[1:, None]
        own, wanted = found.gather(1, following), exact.gather(1, following)
        self.of_text.append(-own)
        self.divergence.append((exact.exp() * (exact - found)).sum(-1))
        self.same_top.append((found.argmax(-1) == exact.argmax(-1)).float())
        self.change.append(own.exp() - wanted.exp())

    def cells(self) -> list[str]:
        """Perplexity; mean KL, and what 99 % stay below; equal tops; change of p."""
        of_text, divergence, same_top, change = (
            torch.cat(each).flatten()
            for each in (self.of_text, self.divergence, self.same_top, self.change)
        )
        return [
            f"{of_text.mean().exp():.4f}",
            f"{divergence.mean():.5f}",
            f"{divergence.quantile(0.99):.4f}",
            f"{same_top.mean():.2%}",
            f"{change.square().mean().sqrt():.2%}",
        ]


def to_steps(weight: torch.Tensor, largest: int, width: int = 0) -> torch.Tensor:
    """Each weight goes to the nearest of the steps of its row, or of its `width` neighbours."""
    parts = weight.unflatten(1, (-1, width)) if width else weight
    scale = parts.abs().amax(-1, keepdim=True) / largest
    steps = (parts / scale.where(scale > 0, 1)).round() * scale
    return steps.view_as(weight)


ROUNDINGS: dict[str, Rounding] = {
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "8 bits, a scale for 32": lambda weight: to_steps(weight, 127, 32),
    "4 bits, a scale a row": lambda weight: to_steps(weight, 7),
}


def rounded_decoder(model: PreTrainedModel, rounding: Rounding, length: int) -> FusedDecoder:
    """A decoder whose matrices are rounded; the embedding, which the LM head shares, is not."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in model.named_parameters():
            yield name, rounding(weight.data) if "_proj" in name else weight.data
        yield "lm_head.weight", rounding(model.lm_head.weight.data)

    config = replace(DecoderConfig.from_hf(model.config), is_tied=False)
    decoder = FusedDecoder(config, rope_table(model.config, length), torch.float32, "cpu")
    decoder.load(weights())
    return decoder


@torch.inference_mode()
def main() -> None:
    """Compare, and print a line for each way to keep the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=positive, default=6)
    parser.add_argument("--length", type=positive, default=256, help="tokens of a window")
    args = parser.parse_args()
    loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
    model, length = loaded.model, args.length
    ids = windows(loaded, args.windows, length)
    exact = FusedDecoder.from_hf(model, max_positions=length)
    wanted = [log_probabilities(exact, window) for window in ids]
    kept = {name: rounded_decoder(model, way, length) for name, way in ROUNDINGS.items()}
    kept["8 bits, a scale a row"] = FusedDecoder.from_hf(
        model,
        max_positions=length,
        products=Products(int8_products(model.device)),
        matrices=Int8Matrices(),
    )
    rows = []
    for name in ("float32", *sorted(kept, reverse=True)):
        losses = Losses()
        for window, log_probs in zip(ids, wanted, strict=True):
            found = log_probs if name == "float32" else log_probabilities(kept[name], window)
            losses.add(found, log_probs, window)
        rows.append([name, *losses.cells()])
    headings = ["weights", "perplexity", "mean KL", "99 % of KL", "same top", "RMS of dp"]
    console.print(f"{loaded.name}, {ids.numel():,} tokens in windows of {length}")
    console.print(table("", headings, rows))


if __name__ == "__main__":
    main()
