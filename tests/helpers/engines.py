"""Helpers for tests of engines: tiny models, Hugging Face as the oracle, faults.

Models are in float64. Then another order of summation changes a logit by 1e-15 instead of 1e-6, so
that no near tie between two tokens makes a test fail once in a thousand runs.

Functions import torch and transformers only where they need them: a scheduler's test is quick.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
import m5_kernels
from m1_single import RequestOutput, SamplingParams
from milestone_llm.core.plan import LaunchedStep
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PACKAGES: list[Any] = [m1_single, m2_batching, m3_paged, m4_prefix_chunked, m5_kernels]
"""Every milestone so far: `every_milestone` tests hold for all of them."""
every_milestone = pytest.mark.parametrize(
    "package", PACKAGES, ids=[package.__name__ for package in PACKAGES]
)


# --- models and the oracle ----------------------------------------------------------------------


@functools.cache
def tiny_model(family: str = "llama", **config_overrides: Any) -> PreTrainedModel:
    """A tiny model in float64, shared by all tests. Do not change it."""
    model = build_tiny_model(family, **config_overrides).double()
    SHARED.add(model)
    model.set_experts_implementation("eager")  # the grouped products of torch know no float64
    return model


SHARED: set[Any] = set()
"""Models of `tiny_model`."""
CHECKED: set[Any] = set()
"""Checks of shared models that have passed, with what they depend on."""


def make_engine(package: Any, model: Any = None, **fields: Any) -> Any:
    """Return an engine of a milestone on a tiny model. It checks its invariants after every
    step."""
    fields = {"max_num_seqs": 4, "check_invariants": True, **fields}
    model = tiny_model() if model is None else model
    probe = "check_padded" if package is m1_single else "check_flat"
    options = fields.get("quantization"), fields.get("adapt_backend")
    checks = {
        f"{package.__name__}.engine.{probe}": (probe, model),
        "m5_kernels.decoder.load.check_logits": (package, model, *options),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, checked in checks.items():
            if checked in CHECKED:  # a check takes longer than making an engine
                patch.setattr(name, lambda *given: None)
        engine = package.LLMEngine(model, **fields)
    if model in SHARED:
        CHECKED.update(checks.values())
    return engine


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    """Return sampling parameters: the likeliest token each time, EOS ignored."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **params})


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths. Token ids 0..2 (pad, BOS, EOS) may be in them: all are
    allowed."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@functools.cache
def _hf_continuation(model: Any, prompt: tuple[int, ...]) -> list[int]:
    return hf_generate(model, list(prompt), 12, eos_token_id=VOCAB_SIZE)


def hf_greedy(model: Any, prompt: Sequence[int], max_tokens: int = 12) -> list[int]:
    """Return the output of Hugging Face's `generate`, past EOS. At most 12 tokens, cached.

    Args:
        model: one of `tiny_model`, or its family.
    """
    assert max_tokens <= 12
    model = tiny_model(model) if isinstance(model, str) else model
    return _hf_continuation(model, tuple(prompt))[:max_tokens]


def hf_generate(model: Any, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Return greedy tokens of `generate` for one prompt.

    The attention mask matters: without it, pad ids inside a prompt are treated as padding.
    """
    import torch

    input_ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()


@functools.cache
def hf_generate_once(model: Any, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Cache `hf_generate` for the slow model: it is computed once for all milestones."""
    return hf_generate(model, list(prompt), max_tokens)


@functools.cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word a token: "w7 w12" is [7, 12], and decoding reverses it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def as_text(token_ids: Sequence[int]) -> str:
    """Return these tokens as `word_tokenizer` writes them."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


# --- driving an engine --------------------------------------------------------------------------


def run_to_end(engine: Any) -> dict[str, RequestOutput]:
    """Step until nothing is left. Returns final outputs by request id."""
    final: dict[str, RequestOutput] = {}
    for _ in range(100_000):
        if not engine.has_unfinished_requests():
            return final
        for output in engine.step():
            if output.finished:
                final[output.request_id] = output
    raise AssertionError("no progress")


def assert_empty(engine: Any) -> None:
    """Assert that no request and no KV memory is left."""
    assert not engine.has_unfinished_requests()
    stats = engine.stats()
    assert (stats["waiting"], stats["running"], stats["kv"]["used"]) == (0, 0, 0)
    assert not engine.core.unfinished
    engine.scheduler.check_invariants()


def break_at_call(
    monkeypatch: pytest.MonkeyPatch,
    target: Any,
    method: str,
    numbers: set[int],
    error: BaseException,
) -> None:
    """Let these calls of a method raise after they have done their work, such as writing KV.

    Args:
        method: name of a method of `target`; "wait" is that of the steps that a runner launches.
        numbers: numbers of the calls; the first is 1.
    """
    calls = itertools.count(1)

    def breaking(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = work(*arguments)
            if next(calls) in numbers:
                raise error
            return result

        return call

    if method != "wait":
        monkeypatch.setattr(target, method, breaking(getattr(target, method)))
        return
    launch = target.launch
    monkeypatch.setattr(target, "launch", lambda plan: LaunchedStep(breaking(launch(plan).wait)))
