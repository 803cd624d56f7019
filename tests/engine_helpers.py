"""What tests of engines share: tiny models, Hugging Face as the oracle, a runner without a model.

Models are in float64. Adding up in another order then moves a logit by 1e-15 and not by 1e-6, so
that no near tie between two tokens makes a test fail once in a thousand runs.

torch and transformers are imported by what needs them: a test of a scheduler does not wait for it.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
import m5_kernels
from m1_single import RequestOutput, SamplingParams
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, build_tiny_model

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
    return build_tiny_model(family, **config_overrides).double()


PROBED: set[Any] = set()
"""Milestones that have tried what the shared model is like."""


def make_engine(package: Any, model: Any = None, **fields: Any) -> Any:
    """An engine of a milestone on a tiny model that checks its invariants after every step."""
    fields = {"max_num_seqs": 4, "check_invariants": True, **fields}
    if model is not None:
        return package.LLMEngine(model, **fields)
    with pytest.MonkeyPatch.context() as patch:
        if package in PROBED:  # which takes longer than to make an engine
            probe = "check_padded" if package is m1_single else "check_flat"
            patch.setattr(f"{package.__name__}.engine.{probe}", lambda model: None)
            patch.setattr("m5_kernels.decoder.load.check_logits", lambda *given: None)
        engine = package.LLMEngine(tiny_model(), **fields)
    PROBED.add(package)
    return engine


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    """Parameters of a request that takes the likeliest token and does not mind EOS."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **params})


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths. Token ids 0..2 (pad, BOS, EOS) are among them: all are allowed."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@functools.cache
def _hf_continuation(family: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    no_token = VOCAB_SIZE
    return hf_generate(tiny_model(family), list(prompt), max_tokens, eos_token_id=no_token)


def hf_greedy(family: str, prompt: Sequence[int], max_tokens: int = 12) -> list[int]:
    """What Hugging Face's `generate` makes of a prompt, past EOS. At most 12 tokens, cached."""
    assert max_tokens <= 12
    return _hf_continuation(family, tuple(prompt), 12)[:max_tokens]


def hf_generate(model: Any, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Greedy tokens of `generate` for one prompt.

    The attention mask matters: without it, pad ids inside a prompt are taken for padding.
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
    """`hf_generate` for the model that is slow: computed once for all milestones."""
    return hf_generate(model, list(prompt), max_tokens)


@functools.cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One word a token: "w7 w12" is [7, 12], and decoding gives it back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def as_text(token_ids: Sequence[int]) -> str:
    """How `word_tokenizer` writes these tokens."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


# --- driving an engine --------------------------------------------------------------------------


def run_to_end(engine: Any) -> dict[str, RequestOutput]:
    """Step until nothing is left; final outputs by request id."""
    final = {}
    for _ in range(100_000):
        if not engine.has_unfinished_requests():
            return final
        for output in engine.step():
            if output.finished:
                final[output.request_id] = output
    raise AssertionError("no progress")


def assert_empty(engine: Any) -> None:
    """Assert that no request and no KV memory is left behind."""
    assert not engine.has_unfinished_requests()
    stats = engine.stats()
    assert (stats["waiting"], stats["running"], stats["kv"]["used"]) == (0, 0, 0)
    engine.scheduler.check_invariants()


def break_at_call(
    monkeypatch: pytest.MonkeyPatch,
    target: Any,
    method: str,
    numbers: set[int],
    error: BaseException,
) -> None:
    """Let these calls of a method raise once its work is done: KV is written, or books are.

    Args:
        method: of `target`; "wait" is that of the steps that a runner launches.
        numbers: the first call is 1.
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


# --- driving a scheduler without a model --------------------------------------------------------


def make_request(
    name: str, num_prompt_tokens: int = 4, max_tokens: int = 3, *, arrival: int = 0, **fields: Any
) -> Request:
    """A request with a prompt of zeros, that needs `max_tokens` tokens."""
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, [0] * num_prompt_tokens, params, arrival=arrival, **fields)


class FakeRunner:
    """Samples token 5 for whoever is due, and EOS for those in `stopping`. It has no KV memory."""

    def __init__(self) -> None:
        self.stopping: set[str] = set()

    def run(self, plan: StepPlan) -> dict[str, list[SampledToken]]:
        """One token for each request that samples."""
        due = [request.request_id for row in plan.rows for request in row.sampling_requests]
        return {name: [SampledToken(EOS_TOKEN_ID if name in self.stopping else 5)] for name in due}


def describe(plan: StepPlan) -> str:
    """A plan as a line: `a[0:4] b[7:8]`; a padding row is `(a)`."""
    return " ".join(
        f"({row.request.request_id})"
        if row.is_padding
        else f"{row.request.request_id}[{row.start}:{row.end}]"
        for row in plan.rows
    )


def scripted_steps(
    scheduler: Any, arrivals: Mapping[int, Sequence[Request]], runner: FakeRunner | None = None
) -> Iterator[StepPlan]:
    """Add requests before the step given, and yield each plan once it has been carried out."""
    runner, last, step = runner or FakeRunner(), max(arrivals, default=0), 0
    num_arrived = 0
    while step <= last or scheduler.has_unfinished_requests():
        for request in arrivals.get(step, ()):
            request.arrival, num_arrived = num_arrived, num_arrived + 1
            scheduler.add(request)
        if scheduler.has_unfinished_requests():
            plan = scheduler.schedule()
            scheduler.update(plan, runner.run(plan))
            scheduler.check_invariants()
            yield plan
        step += 1


def plan_lines(scheduler: Any, arrivals: Mapping[int, Sequence[Request]]) -> list[str]:
    """The golden trace of scripted arrivals: one line a step."""
    return [describe(plan) for plan in scripted_steps(scheduler, arrivals)]
