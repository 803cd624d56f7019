"""Options of one request: how to choose its tokens, and when to stop. Names follow vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .errors import InputError
from .unknown_names import SAMPLING_INSTEAD, refuse_unknown

MAX_LOGIT_BIASES = 1024
"""Most token ids in a request's `logit_bias`."""
NO_LIMIT = 2**31 - 1
"""`max_tokens` of a request that may have as many as fit."""


def is_whole_number(value: object) -> bool:
    """Whether a value is an int, and neither True nor False."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Raises:
        InputError: a value is out of range; the message states the value and the range.
    """

    temperature: float = 1.0
    """0 is greedy; above 0, logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the output become less likely (CTRL, section 4.1)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the token is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once, if the token is in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Numbers added to logits, by token id, before all penalties. None: nothing."""
    seed: int | None = None
    """Makes the request's tokens the same in every run, batch and milestone."""
    max_tokens: int = 16
    """Most tokens to generate; `max_model_len` may end a request before. None: as many as fit."""
    min_tokens: int = 0
    """No stop (EOS, stop token, stop string) before this many tokens."""
    stop: str | Sequence[str] = ()
    """Strings that end the text. None: none."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string, or the token, that has ended it."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the request, besides the model's EOS. None: none."""
    ignore_eos: bool = False
    """Go on after EOS (for benchmarks)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    bad_words: Sequence[str] = ()
    """Texts whose tokens never come one after the other in the output, at the beginning of a word
    or inside of one. None: none."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may come; EOS is not among them unless it is given. None: all."""
    logprobs: int | None = None
    """Give log-probabilities of the sampled token and of this many most likely ones; -1: of the
    whole vocabulary."""
    prompt_logprobs: int | None = None
    """Give log-probabilities also of each prompt token after the first, with this many most likely
    ones, -1 for all. The prompt is computed in full, cached or not."""
    cache_salt: str = ""
    """Requests with different salts never share KV through the prefix cache (from M4 on)."""
    structured_outputs: Any = None
    """`StructuredOutputsParams`: what the output has to look like. None: anything is right."""
    n: int = 1
    """Completions of the same prompt (from m3_paged on)."""

    def __new__(cls, *args: Any, **given: Any) -> SamplingParams:
        """Refuse names that are no fields, before `__init__` does it with fewer words."""
        known = [each.name for each in fields(cls)]
        refuse_unknown(given, known, SAMPLING_INSTEAD, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", NO_LIMIT)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        if isinstance(self.logit_bias, dict | None):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        for name, (is_good, wanted) in _RULES.items():
            value = getattr(self, name)
            if not is_good(value):
                raise InputError(f"{name} must be {wanted}, got {value!r:.200}")
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        for name in (
            "stop",
            "stop_token_ids",
            "bad_words",
        ):  # tuples: checked values do not change any more
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if self.min_tokens > self.max_tokens:
            wanted = f"in [0, max_tokens={self.max_tokens}]"
            raise InputError(f"min_tokens must be {wanted}, got {self.min_tokens}")
        # Above every vocabulary size, all tokens are kept; on a GPU the number must fit in 32 bits.
        object.__setattr__(self, "top_k", min(self.top_k, 2**31 - 1))
        # Below every probability, one token is kept; fp32 has no number that is much smaller.
        object.__setattr__(self, "top_p", max(self.top_p, 1e-30))
        # Outside 1e-30 to 1e30 there is no difference left that fp32 could hold.
        penalty = min(max(self.repetition_penalty, 1e-30), 1e30)
        object.__setattr__(self, "repetition_penalty", penalty)

    def clone(self) -> SamplingParams:
        """Return a copy; `dataclasses.replace` changes fields of one."""
        return replace(self)

    def __repr__(self) -> str:
        default = vars(SamplingParams())
        given = (f"{name}={own!r}" for name, own in vars(self).items() if own != default[name])
        return f"SamplingParams({', '.join(given)})"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bias(token_id: object, value: Any) -> bool:
    return is_whole_number(token_id) and _is_number(value) and -100 <= value <= 100


def _whole(least: int, end: float = float("inf")) -> Callable[[Any], bool]:
    return lambda value: is_whole_number(value) and least <= value < end


def _or_none(is_good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_good(value)


def _items(most: int, is_good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return _or_none(
        lambda value: (
            isinstance(value, list | tuple | set)
            and len(value) <= most
            and all(map(is_good, value))
        )
    )


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # for a NaN every comparison is false
    # From 1e6 on all tokens are equally likely; beyond, fp32 has no room left.
    "temperature": (lambda v: _is_number(v) and 0 <= v <= 1e6, "a number from 0 to 1,000,000"),
    "top_k": (_whole(-1), "a whole number: -1, 0 (both: keep all) or more"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1]"),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number in [0, 1]"),
    "repetition_penalty": (lambda v: _is_number(v) and 0 < v < float("inf"), "a number above 0"),
    "frequency_penalty": (lambda v: _is_number(v) and -2 <= v <= 2, "a number in [-2, 2]"),
    "presence_penalty": (lambda v: _is_number(v) and -2 <= v <= 2, "a number in [-2, 2]"),
    "logit_bias": (
        lambda v: (
            isinstance(v, dict) and len(v) <= MAX_LOGIT_BIASES and all(map(_is_bias, v, v.values()))
        ),
        f"a dictionary of at most {MAX_LOGIT_BIASES:,} token ids, with numbers in [-100, 100]",
    ),
    "seed": (_or_none(_whole(-(2**63), 2**63)), "a whole number in [-(2**63), 2**63) or None"),
    "max_tokens": (_whole(1), "a whole number, at least 1, or None"),
    "min_tokens": (_whole(0), "a whole number in [0, max_tokens]"),
    "stop": (
        _items(64, lambda v: isinstance(v, str) and 0 < len(v) <= 256),
        "a list of at most 64 strings, each of 1 to 256 characters",
    ),
    "stop_token_ids": (_items(1024, is_whole_number), "a list of at most 1,024 whole numbers"),
    "include_stop_str_in_output": (lambda v: isinstance(v, bool), "True or False"),
    "ignore_eos": (lambda v: isinstance(v, bool), "True or False"),
    "skip_special_tokens": (lambda v: isinstance(v, bool), "True or False"),
    "bad_words": (
        _items(1024, lambda v: isinstance(v, str) and 0 < len(v.strip()) <= 256),
        "a list of at most 1,024 strings that are not blank, each of 256 characters at most",
    ),
    "allowed_token_ids": (
        lambda v: v is None or (bool(v) and _items(2**20, is_whole_number)(v)),
        "a list of 1 to 2**20 whole numbers, or None",
    ),
    "logprobs": (_or_none(_whole(-1)), "a whole number, 0 or more, -1 (all) or None"),
    "prompt_logprobs": (_or_none(_whole(-1)), "a whole number, 0 or more, -1 (all) or None"),
    "cache_salt": (lambda v: isinstance(v, str), "a string"),
    "n": (_whole(1), "a whole number, at least 1"),
}
