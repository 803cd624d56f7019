"""Write a checkpoint that all engines can load: `python -m docs.benchmarks.peers.checkpoint FOLDER`

It has the shape of a real model, random weights, and the tokenizer of SmolLM2: text has no meaning,
and speed does not depend on it. With `--config-only` there are no weights: vLLM makes some with
`load_format="dummy"`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from milestone_llm.cli import ended_in_one_line
from milestone_llm.consoles import console
from milestone_llm.models.checkpoint import DEFAULT_MODEL, load_model
from milestone_llm.models.shapes import SHAPES, shape_config

EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B's shape, which M5's decoder does not compute."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.benchmarks.peers.checkpoint", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES, "qwen3-30b-a3b"], default="qwen3-0.6b")
    parser.add_argument("--config-only", action="store_true", help="no weights")
    args = parser.parse_args(arguments)

    def write() -> None:
        has_experts = args.shape not in SHAPES
        config = AutoConfig.for_model(**EXPERTS) if has_experts else shape_config(args.shape)
        kind = "Qwen3MoeForCausalLM" if has_experts else "Qwen3ForCausalLM"
        config.update({"architectures": [kind], "dtype": "bfloat16"})
        if args.config_only:
            config.save_pretrained(args.folder)
        else:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(args.folder)
        tokenizer = load_model(DEFAULT_MODEL, weights=False).tokenizer
        assert tokenizer is not None
        tokenizer.save_pretrained(args.folder)
        console.print(f"wrote {args.folder}", markup=False, soft_wrap=True)

    return ended_in_one_line(write)


if __name__ == "__main__":
    sys.exit(main())
