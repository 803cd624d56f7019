"""What a model loses when its weights get fewer bits: `python -m docs.questions.m5_eight_bits`

The text is Python's own manual, from `pydoc_data`. The same windows of it go through SmolLM2 with
all weights in float32, and with its matrices rounded in several ways; each token is predicted from
those before it. Takes two minutes on two cores.
"""

from __future__ import annotations

import copy
from pydoc_data.topics import topics

import torch

from milestone_llm.consoles import console
from milestone_llm.lab.bench.report import table
from milestone_llm.models.checkpoint import load_model

TOPICS = ("objects", "execmodel", "types", "import")
NUM_WINDOWS, LENGTH = 6, 256


def to_steps(weight: torch.Tensor, largest: int, width: int = 0) -> torch.Tensor:
    """Round each weight to the nearest step of its row, or of its `width` neighbours."""
    parts = weight.unflatten(1, (-1, width)) if width else weight
    scale = parts.abs().amax(-1, keepdim=True) / largest
    return ((parts / scale.where(scale > 0, 1)).round() * scale).view_as(weight)


ROUNDINGS = {
    "float32": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "8 bits, a scale for 32": lambda weight: to_steps(weight, 127, 32),
    "8 bits, a scale a row": lambda weight: to_steps(weight, 127),
    "4 bits, a scale a row": lambda weight: to_steps(weight, 7),
}


def losses(found: torch.Tensor, exact: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return figures of a window's predictions `[length - 1, vocab_size]`, logs: `[4, length -
    1]`."""
    own, wanted = (each.gather(1, ids[1:, None])[:, 0] for each in (found, exact))
    divergence = (exact.exp() * (exact - found)).sum(-1)
    same_top = (found.argmax(-1) == exact.argmax(-1)).float()
    return torch.stack([-own, divergence, same_top, own.exp() - wanted.exp()])


@torch.inference_mode()
def main() -> None:
    """Compare, and print a line for each weight format."""
    loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
    text = "\n".join(topics[name] for name in TOPICS if name in topics)
    ids = torch.tensor(loaded.tokenizer(text)["input_ids"][: NUM_WINDOWS * LENGTH])
    wanted, rows = [], []
    for name, rounding in ROUNDINGS.items():
        model = copy.deepcopy(loaded.model)
        matrix = rounding(model.lm_head.weight)  # apart from the embedding, which is not rounded
        model.lm_head.weight = torch.nn.Parameter(matrix, requires_grad=False)
        for layer, weight in model.named_parameters():
            if "_proj" in layer:
                weight.copy_(rounding(weight))
        found = [model(window[None]).logits[0, :-1].log_softmax(-1) for window in ids.split(LENGTH)]
        wanted = wanted or found
        of_text, divergence, same_top, change = torch.cat(
            [losses(*each) for each in zip(found, wanted, ids.split(LENGTH), strict=True)], dim=1
        )
        rows.append(
            [
                name,
                f"{of_text.mean().exp():.4f}",
                f"{divergence.mean():.5f}",
                f"{divergence.quantile(0.99):.4f}",
                f"{same_top.mean():.2%}",
                f"{change.square().mean().sqrt():.2%}",
            ]
        )
    headings = ["weights", "perplexity", "mean KL", "99 % of KL", "same top", "RMS of dp"]
    console.print(f"{loaded.name}, {ids.numel():,} tokens in windows of {LENGTH}")
    console.print(table("", headings, rows))


if __name__ == "__main__":
    main()
