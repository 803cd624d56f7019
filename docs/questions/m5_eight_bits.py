"""What a model loses when its numbers get fewer bits: `python -m docs.questions.m5_eight_bits`

The text is Python's own manual, from `pydoc_data`. The same windows of it go through SmolLM2 in
float32, and with matrices, activations, keys and values rounded in several ways; each token is
predicted from those before it. The LM head is exact but in the last line. Takes five minutes on
two cores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from m5_kernels.extras.quantization.fp8_rows import RoundedRows
from m5_kernels.kernels.kv_write import to_cache_dtype
from milestone_llm.consoles import console
from milestone_llm.lab.bench.report import table
from milestone_llm.models.checkpoint import load_model

TOPICS = ("objects", "execmodel", "types", "import")
NUM_WINDOWS, LENGTH = 6, 256
E4M3 = torch.float8_e4m3fn

Rounding = Callable[[torch.Tensor], torch.Tensor]


def to_steps(numbers: torch.Tensor, largest: int, width: int = 0) -> torch.Tensor:
    """Round each number to the nearest step of its row, or of its `width` neighbours."""
    parts = numbers.unflatten(-1, (-1, width)) if width else numbers
    scale = parts.abs().amax(-1, keepdim=True) / largest
    return ((parts / scale.where(scale > 0, 1)).round() * scale).view_as(numbers)


def to_e4m3_rows(rows: torch.Tensor) -> torch.Tensor:
    """Round rows, each with its scale."""
    values, scale = RoundedRows.round(rows.flatten(0, -2))
    return (values.float() * scale[:, None]).view_as(rows)


def to_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """Round with one scale for all."""
    return to_e4m3_rows(numbers.reshape(1, -1)).view_as(numbers)


class Format(NamedTuple):
    """What is rounded, and how; None: nothing is."""

    weights: Rounding | None = None
    activations: Rounding | None = None
    kv: Rounding | None = None
    lm_head: Rounding | None = None


def to_cache(numbers: torch.Tensor) -> torch.Tensor:
    """Round keys or values as a cache in e4m3 holds them: without a scale."""
    return to_cache_dtype(numbers, E4M3).float()


FORMATS = {
    "float32": Format(),
    "bfloat16 weights": Format(lambda weight: weight.bfloat16().float()),
    "int8 weights, a scale for 32": Format(lambda weight: to_steps(weight, 127, 32)),
    "int8 weights, a scale a row": Format(lambda weight: to_steps(weight, 127)),
    "int4 weights, a scale a row": Format(lambda weight: to_steps(weight, 7)),
    "e4m3 weights, a scale a row": Format(to_e4m3_rows),
    "e4m3 weights, a scale a matrix": Format(to_e4m3),
    "and activations, a scale a token": Format(to_e4m3, to_e4m3_rows),
    "e4m3 keys and values": Format(kv=to_cache),
    "all three in e4m3": Format(to_e4m3, to_e4m3_rows, to_cache),
    "the LM head alone in e4m3": Format(lm_head=to_e4m3),
}


def rounded(model: Any, number: int, form: Format) -> Any:
    """Return a copy of a model that rounds. number: of the format."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            if form.weights:
                module.weight.copy_(form.weights(module.weight))
            if (rounding := form.activations) is not None:
                module.register_forward_pre_hook(
                    lambda _, inputs, rounding=rounding: (rounding(inputs[0]),)
                )
    if form.lm_head:  # tied to the embedding, which stays exact
        model.lm_head.weight = torch.nn.Parameter(form.lm_head(model.lm_head.weight))
    if (rounding_kv := form.kv) is not None:

        def attention(
            module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any
        ) -> Any:
            key, value = rounding_kv(key), rounding_kv(value)
            return sdpa_attention_forward(module, query, key, value, *args, **more)

        AttentionInterface.register(f"rounded_kv_{number}", attention)
        model.set_attn_implementation(f"rounded_kv_{number}")
    return model


def losses(found: torch.Tensor, exact: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return figures of a window's predictions `[length - 1, vocab_size]`, logs: `[3, length -
    1]`."""
    own = found.gather(1, ids[1:, None])[:, 0]
    divergence = (exact.exp() * (exact - found)).sum(-1)
    same_top = (found.argmax(-1) == exact.argmax(-1)).float()
    return torch.stack([-own, divergence, same_top])


@torch.inference_mode()
def main() -> None:
    """Compare, and print a line for each format."""
    loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
    text = "\n".join(topics[name] for name in TOPICS if name in topics)
    ids = torch.tensor(loaded.tokenizer(text)["input_ids"][: NUM_WINDOWS * LENGTH])
    wanted: list[torch.Tensor] = []
    rows = []
    for number, (name, form) in enumerate(FORMATS.items()):
        model = rounded(loaded.model, number, form)
        found = [model(window[None]).logits[0, :-1].log_softmax(-1) for window in ids.split(LENGTH)]
        wanted = wanted or found
        of_text, divergence, same_top = torch.cat(
            [losses(*each) for each in zip(found, wanted, ids.split(LENGTH), strict=True)], dim=1
        )
        rows.append(
            [
                name,
                f"{of_text.mean().exp():.3f}",
                f"{divergence.mean():.5f}",
                f"{divergence.quantile(0.99):.4f}",
                f"{same_top.mean():.1%}",
            ]
        )
    headings = ["numbers", "perplexity", "mean KL", "99 % of KL", "same top"]
    console.print(f"{loaded.name}, {ids.numel():,} tokens in windows of {LENGTH}")
    console.print(table("", headings, rows))


if __name__ == "__main__":
    main()
