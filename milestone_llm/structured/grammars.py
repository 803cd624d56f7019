"""Grammars over a model's tokens, compiled by llguidance.

`Grammars` compiles each grammar once; every request gets a copy of its own. Compiling may take a
second. It is done where prompts are encoded, so that no step waits for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from milestone_llm.core.allowed_tokens import AllowedTokens
from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams

from .params import StructuredOutputsParams

if TYPE_CHECKING:
    from torch import Tensor

NICENESS = 10
"""Niceness of a server's compiling thread, relative to its other threads."""
MAX_COMPILED = 64
"""Most compiled grammars that are kept for later requests."""


class Grammar(AllowedTokens):
    """The grammar of one request: a matcher that follows its output.

    Args:
        matcher: an `LLMatcher` in its initial state.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self._words: Tensor | None = None
        self._followed: list[int] = []
        """Tokens that the matcher has accepted."""

    @property
    def num_allowed(self) -> int:
        """Number of tokens that the last bitmask allows."""
        if self._words is None:
            return self.vocab_size
        return sum(int(word).bit_count() for word in self._words.numpy().view("uint32"))

    def bits(self, output_token_ids: Sequence[int]) -> Tensor:
        """Return the bitmask of allowed tokens, int32 `[ceil(vocab_size / 32)]`.

        Only a rejected draft token can make the output break the grammar. Then everything is
        allowed, because tokens after a rejected one are not kept.
        """
        import torch

        num_words = (self.vocab_size + 31) // 32
        if self._follow(output_token_ids) < len(output_token_ids):
            return torch.full((num_words,), -1, dtype=torch.int32)
        self._words = torch.zeros(num_words, dtype=torch.int32)
        if not self.matcher.is_error():
            self.matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), 4 * num_words)
        return self._words

    def continuation(
        self, output_token_ids: Sequence[int], token_ids: list[int], most: int
    ) -> list[int]:
        """Return tokens that the grammar forces; if there are none, those of `token_ids` that may
        follow."""
        self._follow(output_token_ids)
        forced = self.matcher.compute_ff_tokens()[:most]
        return forced or token_ids[: self.matcher.validate_tokens(token_ids)]

    def _follow(self, token_ids: Sequence[int]) -> int:
        """Bring the matcher to this output. Returns how many of its tokens the grammar accepts."""
        pairs = zip(self._followed, token_ids, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_common < len(self._followed):
            self.matcher.rollback(len(self._followed) - num_common)
        del self._followed[num_common:]
        news = list(token_ids[num_common:])
        self._followed += news[: self.matcher.try_consume_tokens(news)] if news else []
        return len(self._followed)


def compiling_thread() -> ThreadPoolExecutor:
    """Return a thread in which a server compiles. If cores are scarce, other threads go first.

    This works on Linux, where each thread has its own niceness. Elsewhere it is a normal thread.
    """

    def step_back() -> None:
        if sys.platform == "linux":
            os.nice(NICENESS)

    return ThreadPoolExecutor(1, "grammars", step_back)


class Grammars:
    """Makes the grammars of requests. It does no work before the first is asked for.

    Args:
        tokenizer: the model's tokenizer; None: grammars are not possible.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._compiled = OrderedDict[str, Any]()
        """Matchers in their initial state, by the key of their parameters; the newest is last."""
        self._compiling = threading.Lock()
        """Held while one is compiled. A request whose grammar is ready does not need the lock."""
        self._tokens: Any = None

    def rule_of(self, params: SamplingParams) -> AllowedTokens | None:
        """Return a grammar of the request's own, at the beginning of its output; None: it has none.

        Raises:
            InputError: llguidance or the tokenizer is missing, or the grammar cannot be compiled.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return None
        if not isinstance(wanted, StructuredOutputsParams):
            raise InputError(
                f"structured_outputs must be StructuredOutputsParams, got {wanted!r:.200}"
            )
        if params.ignore_eos:
            raise InputError("structured_outputs end with EOS: ignore_eos cannot be True")
        matcher = self._compiled.get(wanted.key)
        if matcher is None:
            with self._compiling:
                matcher = self._compiled.get(wanted.key) or self._compile(wanted)
                self._compiled[wanted.key] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return Grammar(matcher.deep_copy(), self.vocab_size)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise InputError(
                'structured outputs need llguidance: pip install "milestone-llm[structured]"'
            ) from None
        if self._tokens is None:
            if self.tokenizer is None or not self.eos_token_ids:
                missing = "tokenizer" if self.tokenizer is None else "EOS token"
                raise InputError(f"structured outputs need a {missing}, and the model has none")
            try:
                self._tokens = from_tokenizer(self.tokenizer, self.vocab_size, self.eos_token_ids)
            except ValueError as error:
                raise InputError(f"structured outputs cannot use this tokenizer: {error}") from None
        matcher = LLMatcher(self._tokens, _source(params), log_level=0)
        if matcher.is_error():
            raise InputError(f"structured outputs cannot use this: {matcher.get_error():.500}")
        return matcher


def _source(params: StructuredOutputsParams) -> str:
    """Return the text that llguidance compiles."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    return LLMatcher.grammar_from_json_schema(params.json or '{"type": "object"}')
