"""Every family of transformers is served right or refused; nothing comes out wrong.

The quick part takes the families that once gave wrong tokens or raw errors, and those that most
people use; `STORM=1` takes all of them, a few minutes. `python -m milestone_llm.lab.families`
prints the same as a table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import pytest

from m5_kernels.decoder.families import FAMILIES
from milestone_llm import MILESTONES
from milestone_llm.lab.families import VARIANTS, Outcome, family_names, try_family

IS_STORM = bool(os.environ.get("STORM"))
FIRST_AND_SECOND = ("m1_single", "m2_batching")

SERVED = [
    "llama",
    "qwen2",
    "mixtral",
    "gemma3_text",
    "olmo2",
    "glm4",
    "phi3",
    "gpt_neox",
    "gpt_oss",
]
NOT_BY_M2 = {
    "diffllama": "not called once in each of its 4 layers",
    "doge": "a sliding window of 8 that attention is not told of",
    "gemma2": "soft-capping",
    "jetmoe": "keys and values of shapes",
    "nemotron": "hand no keywords",
    "bloom": "cannot be replaced",
}
NOT_AT_ALL = {
    "lfm2": "conv",
    "minimax": "linear_attention",
    "recurrent_gemma": "linear_attention|other logits|not called once",
    "mamba": "linear_attention",
    "bigbird_pegasus": "other logits",
    "rwkv": "other logits|not one shape",
    "prophetnet": "other logits|cannot be replaced",
}
"""What their refusal says; with some versions of transformers one, with others another."""


def outcomes(
    name: str, milestones: Sequence[str] = FIRST_AND_SECOND, **overrides: Any
) -> dict[str, Outcome]:
    """Try a family, if this transformers has it: nothing comes out wrong."""
    if name not in family_names():
        pytest.skip(f"this transformers has no {name}")
    found = try_family(name, milestones, **overrides)
    for milestone, each in found.items():
        assert each.kind in ("equal", "refused", "not built"), f"{name}, {milestone}: {each}"
    return found


def kinds(found: dict[str, Outcome]) -> list[str]:
    return [each.kind for each in found.values()]


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite"])
def test_keys_wider_than_values_are_served_but_by_m5(name: str) -> None:
    found = outcomes(name, ("m2_batching", "m3_paged", "m5_kernels"))
    assert kinds(found) == ["equal", "equal", "refused"]
    detail = found["m5_kernels"].detail
    assert re.search("keys of 32 numbers and values of 16.*M4 serves it", detail)


@pytest.mark.parametrize("name", SERVED)
def test_common_families_give_the_tokens_of_generate(name: str) -> None:
    # M5's table of families has a test of its own.
    others = () if name in FAMILIES else ("m5_kernels",)
    assert set(kinds(outcomes(name, (*FIRST_AND_SECOND, *others)))) == {"equal"}


@pytest.mark.parametrize("name", [*NOT_BY_M2, *NOT_AT_ALL])
def test_state_and_attention_of_other_kinds_are_refused_by_name(name: str) -> None:
    features = NOT_BY_M2.get(name) or NOT_AT_ALL[name]
    milestones = FIRST_AND_SECOND[1:] if name in NOT_BY_M2 else FIRST_AND_SECOND
    for found in outcomes(name, milestones).values():
        assert found.kind == "refused"
        assert any(feature in found.detail for feature in features.split("|")), found.detail
        assert found.detail.endswith("M1 serves it") == (name in NOT_BY_M2)


@pytest.mark.parametrize("name", ["bloom", "granite_swa", "llama"])
def test_padding_that_becomes_nan_is_refused_by_m1(name: str) -> None:
    """A mask of the lowest float64 is -inf in a softmax in float32: all masked, a row is NaN."""
    found = outcomes(name, FIRST_AND_SECOND[:1], **VARIANTS["float64 and eager"])["m1_single"]
    assert found.kind == "refused"
    assert "no numbers in a padded batch" in found.detail or "only NaN" in found.detail
    assert "torch.float64" in found.detail


@pytest.mark.parametrize("variant", ["a window of 2", "a window of 7"])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_window_of_two_is_served(name: str, variant: str) -> None:
    assert kinds(outcomes(name, **VARIANTS[variant])) == ["equal", "equal"]


@pytest.mark.parametrize(
    "overrides", [{"hidden_act": "gelu"}, {"pretraining_tp": 2}], ids=["gelu", "pretraining_tp"]
)
def test_m5_serves_what_only_hugging_faces_modules_can_compute(overrides: dict[str, Any]) -> None:
    assert kinds(outcomes("llama", ("m5_kernels",), **overrides)) == ["equal"]


in_storms = pytest.mark.parametrize(
    "name",
    family_names()
    if IS_STORM
    else [pytest.param("all", marks=pytest.mark.skip(reason="families take minutes: STORM=1"))],
)
"""For every family that this release of transformers has."""


@in_storms
def test_every_family_is_equal_or_refused(name: str) -> None:
    outcomes(name, MILESTONES)


@pytest.mark.parametrize("variant", VARIANTS if IS_STORM else ["float64"])
@in_storms
def test_every_variant_of_a_family_is_equal_or_refused(name: str, variant: str) -> None:
    outcomes(name, **VARIANTS[variant])
