"""How one request wants its tokens chosen and when it wants to stop. Names follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_TEMPERATURE = 1e6
"""Here all tokens are equally likely; beyond, fp32 has no room left."""

_MAY_BE_ABSENT = ("seed", "logprobs", "prompt_logprobs")


def is_whole_number(value: object) -> bool:
    """Whether a value is an int; True and False do not count as 1 and 0."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Raises:
        ValueError: a value is out of range; the message states the value and the range.
    """

    temperature: float = 1.0
    """0 is greedy; above, logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the output become less likely (CTRL, section 4.1)."""
    seed: int | None = None
    """Makes the request's tokens the same in every run, batch and milestone."""
    max_tokens: int = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """No stop (EOS, stop token, stop string) before this many tokens."""
    stop: str | list[str] = field(default_factory=list)
    """Strings that end the text; they are not part of it. None: none."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end the request, besides the model's EOS. None: none."""
    ignore_eos: bool = False
    """Go on after EOS (for benchmarks)."""
    logprobs: int | None = None
    """Give log-probabilities of the sampled token and of this many most likely ones."""
    prompt_logprobs: int | None = None
    """The same of each prompt token after the first; such a prompt is computed in full, whatever
    the prefix cache holds."""
    cache_salt: str = ""
    """Requests with different salts never share KV through the prefix cache (from M4 on)."""
    n: int = 1
    """Completions of the same prompt (from m3_paged on)."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _check(isinstance(value, list | tuple | set | None), name, value, "a list or None")
            object.__setattr__(self, name, list(value or ()))
        for name in ("top_k", "max_tokens", "min_tokens", "n", *_MAY_BE_ABSENT):
            value = getattr(self, name)
            is_absent = value is None and name in _MAY_BE_ABSENT
            _check(is_absent or is_whole_number(value), name, value, "a whole number")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            _check(is_number, name, value, "a number")
        _check(
            0 <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            self.temperature,
            f"at least 0 and at most {MAX_TEMPERATURE:,.0f}",
        )
        _check(self.top_k >= -1, "top_k", self.top_k, "-1, 0 (both: keep all) or more")
        # More than any vocabulary has means all; the number has to fit into 32 bits on a GPU.
        object.__setattr__(self, "top_k", min(self.top_k, 2**31 - 1))
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        # Less than any token has means the likeliest; fp32 knows no number that is much smaller.
        object.__setattr__(self, "top_p", max(self.top_p, 1e-30))
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _check(
            0 < self.repetition_penalty < float("inf"),
            "repetition_penalty",
            self.repetition_penalty,
            "above 0",
        )
        _check(
            self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "in [0, 2**64) or None"
        )
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"in [0, max_tokens={self.max_tokens}]",
        )
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _check(isinstance(self.cache_salt, str), "cache_salt", self.cache_salt, "a string")
        are_texts = all(isinstance(text, str) and text for text in self.stop)
        _check(are_texts, "stop", self.stop, "a list of strings, none of them empty")
        are_ids = all(is_whole_number(token_id) for token_id in self.stop_token_ids)
        _check(are_ids, "stop_token_ids", self.stop_token_ids, "a list of whole numbers")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= 0, name, value, "0 or more")
        _check(self.n >= 1, "n", self.n, "at least 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing a random number."""
        return self.temperature == 0


def _check(is_good: bool, name: str, value: object, wanted: str) -> None:
    if not is_good:  # written so that a NaN, for which every comparison is false, is refused too
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
