"""Grammars over a model's tokens, by llguidance.

`Grammars` compiles, each grammar once; a request gets a copy of its own. Compiling may take a
second. It happens where prompts are encoded, so no step waits for it.
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
"""By which a server's thread that compiles is nicer than its others."""
MAX_COMPILED = 64
"""Grammars that are kept for requests to come."""


class Grammar(AllowedTokens):
    """The rule of one request: a matcher that follows its output.

    Args:
        matcher: an `LLMatcher` at its beginning.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self._words: Tensor | None = None
        self._followed: list[int] = []
        """Tokens that the matcher has taken."""

    @property
    def num_allowed(self) -> int:
        """How many tokens the bits that were asked for last allow."""
        if self._words is None:
            return self.vocab_size
        return sum(int(word).bit_count() for word in self._words.numpy().view("uint32"))

    def bits(self, output_token_ids: Sequence[int]) -> Tensor:
        """int32 `[ceil(vocab_size / 32)]`. After an output that breaks the rule, which only a wrong
        guess can make, everything: what comes after a wrong guess is not kept."""
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
        """Tokens that are forced, else those of `token_ids` that may follow."""
        self._follow(output_token_ids)
        forced = self.matcher.compute_ff_tokens()[:most]
        return forced or token_ids[: self.matcher.validate_tokens(token_ids)]

    def _follow(self, token_ids: Sequence[int]) -> int:
        """Bring the matcher to this output; returns how many of its tokens it has taken."""
        pairs = zip(self._followed, token_ids, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_common < len(self._followed):
            self.matcher.rollback(len(self._followed) - num_common)
        del self._followed[num_common:]
        news = list(token_ids[num_common:])
        self._followed += news[: self.matcher.try_consume_tokens(news)] if news else []
        return len(self._followed)


def compiling_thread() -> ThreadPoolExecutor:
    """A thread for a server to compile in: where cores are scarce, the others have them first.

    On Linux, where niceness is a thread's own. Elsewhere it is a thread like any other.
    """

    def step_back() -> None:
        if sys.platform == "linux":
            os.nice(NICENESS)

    return ThreadPoolExecutor(1, "grammars", step_back)


class Grammars:
    """Makes the rules of requests; nothing before the first is asked for.

    Args:
        tokenizer: of the model; None: there can be no grammar.
        eos_token_ids: those that end an output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._compiled = OrderedDict[str, Any]()
        """Matchers at their beginning, by the key of what they were made of; the newest last."""
        self._compiling = threading.Lock()
        """Held while one is made: whoever asks for one that is ready does not wait for it."""
        self._tokens: Any = None

    def rule_of(self, params: SamplingParams) -> AllowedTokens | None:
        """A request's own rule, at the beginning of its output; None if it wants none.

        Raises:
            InputError: llguidance or the tokenizer is missing, or it cannot compile this.
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
    """What llguidance compiles."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    return LLMatcher.grammar_from_json_schema(params.json or '{"type": "object"}')
