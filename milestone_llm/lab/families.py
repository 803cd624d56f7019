"""Try every causal language model of transformers: `python -m milestone_llm.lab.families`.

A tiny model with random weights is built of each type. An engine must give the tokens of Hugging
Face's `generate`, or reject the model when the engine is built. If `generate` gives other tokens
without a KV cache, the right ones are unknown, and the engine must reject the model. The only other
outcome is "not built": a type that cannot be made small.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from milestone_llm import MILESTONES
from milestone_llm.core.errors import InputError
from milestone_llm.models.hub_files import one_line
from milestone_llm.models.pretrained import quiet_transformers

MAX_PARAMETERS = 20_000_000
NUM_OUTPUT_TOKENS = 8
PROMPT_LENGTHS = (3, 21, 9)  # one is longer than every window

VOCAB_SIZE = 199

WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "sliding_window_size",
    "local_attention",
)
"""Config fields for the number of tokens that a layer attends to."""

_SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd dim_model emb_dim embedding_dim embedding_size "
    "backbone_hidden_size word_embed_proj_dim input_embedding_size output_embedding_size lru_width",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_decoder_layers num_encoder_layers "
    "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
    "swa_num_attention_heads linear_num_key_heads linear_num_value_heads linear_num_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num index_topk",
    2: "num_key_value_heads swa_num_key_value_heads num_kv_heads kv_n_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_top_k eos_token_id",
    128: "intermediate_size ffn_dim n_inner d_inner dff dim_ff d_ff decoder_ffn_dim "
    "encoder_ffn_dim ffn_hidden_size intermediate_size_mlp feed_forward_size "
    "dense_intermediate_size max_position_embeddings n_positions max_seq_len n_ctx "
    "context_length max_target_positions max_source_positions",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "expert_ffn_hidden_size image_size",
    16: "head_dim swa_head_dim d_head d_kv dim_head kv_channels attention_head_size "
    "attention_head_dim v_head_dim q_lora_rank kv_lora_rank o_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim index_head_dim rotary_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim hidden_size_per_layer_input",
    8: "attention_chunk_size state_size mamba_d_state ssm_state_size mamba_chunk_size",
    1: "n_group topk_group first_k_dense_replace num_dense_layers num_expert_group "
    "n_shared_experts moe_k max_window_layers bos_token_id",
    0: "num_kv_shared_layers pad_token_id",
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input",
}
SMALL: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    **dict.fromkeys(WINDOWS, 8),
    "tie_word_embeddings": False,
    "is_decoder": True,
}
"""Value of each config field that has to do with size, in every family that has it."""

_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "mamba2": {"head_dim": 32, "n_groups": 1},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further fields that a family needs."""

VARIANTS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": torch.float64},
    "eager": {"attention": "eager"},
    "float64 and eager": {"dtype": torch.float64, "attention": "eager"},
    **{f"a window of {window}": {"window": window} for window in (2, 7)},
}
"""Arguments of `try_family`: further properties that a model may have."""


@dataclass(frozen=True)
class Outcome:
    """The result of one family in one milestone: equal, refused, not built or WRONG."""

    kind: str
    detail: str = ""


def family_names() -> list[str]:
    """Return the model types with a causal language model in the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_small_model(
    name: str, seed: int = 0, window: int | None = None, **overrides: Any
) -> PreTrainedModel:
    """Build a small model of a type, with random float32 weights.

    Args:
        window: size of its sliding windows; None: 8.

    Raises:
        ValueError: it cannot be built, or not small, or has no window.
    """
    try:
        config_class = CONFIG_MAPPING[name]
        fields = _small_fields(config_class)
        if window is not None and not _set_windows(fields, window):
            raise ValueError("no sliding window")
        config = config_class(**{**fields, **overrides})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
            num_parameters = sum(weight.numel() for weight in model.parameters())
        if num_parameters > MAX_PARAMETERS:
            raise ValueError(f"{num_parameters / 1e6:.0f} million parameters at its smallest")
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model = model.eval().requires_grad_(False)
            _randomise(model)
    except Exception as error:  # the code of 200 families may raise anything
        lines = str(error).strip().splitlines() or [""]
        raise ValueError(f"{type(error).__name__}: {' '.join(lines)[:200]}") from error
    return model


def _small_fields(config_class: Any) -> dict[str, Any]:
    """Return keyword arguments that make a config of this class small, its sub-configs too."""
    fields: dict[str, Any] = {}
    try:
        default = config_class()
    except Exception:  # its defaults contradict each other
        default = config_class.__new__(config_class)
    for name in [*vars(default), *getattr(config_class, "attribute_map", {})]:
        if name in getattr(default, "sub_configs", {}) and getattr(default, name) is not None:
            fields[name] = _small_fields(type(getattr(default, name)))
        elif name in SMALL:
            fields[name] = SMALL[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(
            getattr(default, name, None), int
        ):
            fields[name] = 3
    for name in ("layer_types", "mlp_layer_types"):  # some layers of each kind
        kinds = list(dict.fromkeys(vars(default).get(name) or []))
        if kinds:
            num_layers = SMALL["num_hidden_layers"]
            fields[name] = (kinds * num_layers)[:num_layers]
    if "kv_lora_rank" in fields:  # keys and values of all heads come from one latent vector
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return {**fields, **SPECIAL.get(config_class.model_type, {})}


def _set_windows(fields: dict[str, Any], window: int) -> bool:
    """Set this window in a config and its sub-configs. Returns False if they have none."""
    own = [name for name in WINDOWS if name in fields]
    fields.update(dict.fromkeys(own, window))
    parts = [each for each in fields.values() if isinstance(each, dict)]
    return any([bool(own), *(_set_windows(part, window) for part in parts)])


def _randomise(model: PreTrainedModel) -> None:
    """Fill in weights so large that greedy outputs vary, and change every bias and norm."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.2)
        else:
            weight.add_(torch.randn_like(weight) * 0.1)


def try_family(
    name: str,
    milestones: Sequence[str],
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    **overrides: Any,
) -> dict[str, Outcome]:
    """Try a model type. Returns its outcome for each milestone.

    Args:
        dtype: dtype of its weights.
        attention: Hugging Face's name of the attention implementation, such as "eager".
        overrides: fields of its config, or `window`.
    """
    try:
        with quiet_transformers(), contextlib.redirect_stdout(io.StringIO()):
            model = build_small_model(name, **overrides).to(dtype)
            if attention is not None:
                model.set_attn_implementation(attention)
            expected = [_generate(model, prompt) for prompt in _prompts()]
            if not all(map(partial(_is_uncached, model), _prompts(), expected)):
                expected = []
    except ValueError as error:
        return dict.fromkeys(milestones, Outcome("not built", str(error)))
    except Exception as error:
        reason = f"Hugging Face's generate raises {one_line(error)}"
        return dict.fromkeys(milestones, Outcome("not built", reason))
    return {milestone: _try_milestone(model, expected, milestone) for milestone in milestones}


def _try_milestone(model: PreTrainedModel, expected: list[list[int]], milestone: str) -> Outcome:
    """Serve three prompts, two of them together, and compare the tokens."""
    package = importlib.import_module(milestone)
    greedy = package.SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    try:
        engine = package.LLMEngine(model, max_num_seqs=2, max_model_len=64, check_invariants=True)
    except InputError as error:
        return Outcome("refused", str(error).partition(" cannot be served: ")[2] or str(error))
    except Exception as error:
        return Outcome("WRONG", f"raised {one_line(error)} instead of a refusal")
    try:
        outputs = engine.generate([prompt.tolist() for prompt in _prompts()], greedy)
        engine.stats()
    except Exception as error:
        return Outcome("WRONG", f"was accepted and raised {one_line(error)}")
    got = [output.token_ids for output in outputs]
    if not expected:
        return Outcome("WRONG", "was accepted, and `generate` gives other tokens without a cache")
    return Outcome("equal") if got == expected else Outcome("WRONG", f"{got}, not {expected}")


def _prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, VOCAB_SIZE, (n,), generator=generator) for n in PROMPT_LENGTHS]


def _generate(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    """Return greedy tokens of Hugging Face; EOS does not end them."""
    output = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=NUM_OUTPUT_TOKENS,
        do_sample=False,
        eos_token_id=VOCAB_SIZE,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def _is_uncached(model: PreTrainedModel, prompt: torch.Tensor, tokens: list[int]) -> bool:
    """Return whether these tokens are also the likeliest without a KV cache, except for
    rounding."""
    chosen, whole = torch.tensor(tokens)[:, None], torch.cat([prompt, torch.tensor(tokens)])[None]
    logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits[
        0, len(prompt) - 1 : -1
    ]
    return bool((logits.gather(1, chosen) > logits.amax(dim=1, keepdim=True) - 1e-3).all())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 1 if a family is served wrong, else 0."""
    parser = argparse.ArgumentParser("python -m milestone_llm.lab.families", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types; all if not given")
    parser.add_argument(
        "--milestone", nargs="+", choices=MILESTONES, default=["m1_single", "m2_batching"],
        help="default: %(default)s, of which the second stands for M3 and M4, too",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    names, milestones = options.only or family_names(), options.milestone
    if unknown := sorted(set(names).difference(family_names())):
        parser.error(f"transformers has no causal language model of type {', '.join(unknown)}")
    counts: dict[str, Counter[str]] = {milestone: Counter() for milestone in milestones}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in track(names, "Trying families", console=Console(stderr=True)):
        outcomes = try_family(name, milestones)
        for milestone, outcome in outcomes.items():
            counts[milestone][outcome.kind] += 1
        kinds = [outcome.kind for outcome in outcomes.values()]
        details = dict.fromkeys(
            outcome.detail.partition(" (relative error")[0] for outcome in outcomes.values()
        )
        groups.setdefault((*kinds, "; ".join(filter(None, details))), []).append(name)
    table = Table(*milestones, "families", show_lines=True)
    for (*kinds, why), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        reason = f"[italic]{escape(why)}:[/] " if why else ""
        table.add_row(*kinds, f"{reason}{', '.join(members)}")
    Console().print(table)
    for milestone, count in counts.items():
        Console().print(f"{milestone}: {', '.join(f'{n} {kind}' for kind, n in count.items())}")
    return int(any(count["WRONG"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
