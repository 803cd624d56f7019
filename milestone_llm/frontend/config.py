"""The configuration of an engine: `EngineConfig`, one frozen dataclass per milestone.

This one is M1's, with the fields that all engines have. Each later milestone derives its own from
that of the milestone before, and states only the fields and checks that it adds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

from milestone_llm.core.errors import InputError
from milestone_llm.core.unknown_names import refuse_unknown

from .vllm_names import ENGINE_INSTEAD, asks_for_nothing

Config = TypeVar("Config", bound="EngineConfig")


@dataclass(frozen=True)
class EngineConfig:
    """Limits and switches of an engine. All lengths are in tokens.

    Raises:
        InputError: a limit is not positive; the message states the number.
    """

    max_num_seqs: int = 8
    """Most requests that one step computes. From m3_paged on, 256 on a GPU if not given."""
    max_model_len: int | None = None
    """Most tokens (prompt and output) of one request. None: the length that the model was trained
    for, but at most `max_num_batched_tokens` where a prompt is computed whole, and at most what KV
    memory holds."""
    max_num_batched_tokens: int = 2048
    """Most tokens that one step computes, padding included."""
    dtype: str | None = None
    """"float32", "bfloat16" or "float16". None or "auto": float32 on a CPU, bfloat16 on CUDA. A
    ready model is never cast: give its own dtype, or None."""
    device: str | None = None
    """"cpu", "cuda", "cuda:1"... None: CUDA where there is one. A ready model is never moved."""
    revision: str | None = None
    """Branch, tag or commit of the model's Hugging Face repository. None: main."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""
    trace: str | None = None
    """"console", a path in .jsonl or .jsonl.gz, or None. `MILESTONE_LLM_TRACE=1` prints in
    addition."""
    check_invariants: bool = False
    """Check after every step that no region or block is lost (slow; the tests set it)."""
    scheduler: str | None = None
    """A Python file with a scheduler that takes the place of the milestone's own."""

    def __post_init__(self) -> None:
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", None)
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if name in ("dtype", "device"):  # torch's own types are allowed here
                continue
            if isinstance(value, bool):
                is_good = kind in (bool, bool | None)  # True does not pass for the number 1
            else:
                is_good = isinstance(value, kind)
                is_good |= isinstance(value, int) and isinstance(0.0, kind)
            if not is_good:
                wanted = getattr(kind, "__name__", str(kind))
                raise InputError(f"{name} must be of type {wanted}, got {value!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.max_model_len is not None:
            self.checked_length(self.max_model_len)

    @property
    def kv_dtype(self) -> str | None:
        """The name of torch's dtype for keys and values; None: the model's."""
        return None

    @property
    def has_chunked_prefill(self) -> bool:
        """Whether a prompt may be computed in several steps, as it may from M4 on."""
        return False

    @classmethod
    def from_fields(cls: type[Config], **given: Any) -> Config:
        """Build a config from keyword arguments. Arguments of vLLM's that no engine here has are
        taken where their value asks for nothing (`enable_lora=False`).

        Raises:
            InputError: a keyword is no field; the message says what to use instead, or names the
                nearest one.
        """
        known = [field.name for field in fields(cls)]
        given = {
            name: value
            for name, value in given.items()
            if not (name == "seed" and value is None)
            and (name in known or not asks_for_nothing(name, value))
        }
        refuse_unknown(given, known, ENGINE_INSTEAD, f"{cls.__module__}.EngineConfig")
        return cls(**given)

    def check_prompt_fits_step(self, num_prompt_tokens: int) -> None:
        """Refuse a prompt that is larger than a step, for schedulers that compute a prompt whole.

        Raises:
            InputError: the prompt is larger than a step.
        """
        if num_prompt_tokens > self.max_num_batched_tokens:
            raise InputError(
                f"the prompt has {num_prompt_tokens} tokens, but a step computes at most "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )

    def check_completions(self, n: int, can_share_kv: bool = True) -> None:
        """Check the number of completions of a prompt: they share its KV and start together.

        Raises:
            InputError: completions cannot share KV in this milestone, or there are more than may
                run.
        """
        if n > 1 and not can_share_kv:
            raise InputError(
                f"n={n}: completions of a prompt share its KV from m3_paged on; here, add the "
                f"prompt {n} times"
            )
        if n > self.max_num_seqs:
            raise InputError(
                f"n={n} completions start together, but max_num_seqs={self.max_num_seqs}"
            )

    def resolve_max_model_len(self, model_max_len: int | None) -> int:
        """Return the `max_model_len` in force for a model trained for `model_max_len` tokens.

        Raises:
            InputError: the configured length exceeds what the model can take.
        """
        if self.max_model_len is None:
            length = model_max_len or self.max_num_batched_tokens
            if not self.has_chunked_prefill:
                length = min(length, self.max_num_batched_tokens)
            return self.checked_length(length)
        if model_max_len is not None and self.max_model_len > model_max_len:
            raise InputError(
                f"max_model_len is {self.max_model_len}, but the model has positions for only "
                f"{model_max_len} tokens"
            )
        return self.max_model_len

    def checked_length(self, max_model_len: int) -> int:
        """Return a `max_model_len` that was given, or follows from other limits, if it is usable.

        Raises:
            InputError: no request would fit.
        """
        if max_model_len < 2:
            what = f"max_model_len must be at least 2, got {max_model_len}"
            if self.max_model_len is None:
                what = f"the other limits leave {max_model_len} tokens for a request: raise them"
            raise InputError(f"{what} (one token of prompt and one of output)")
        return max_model_len
