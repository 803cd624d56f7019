"""Grammars over a model's tokens, compiled by llguidance.

`Grammars` compiles each grammar once; every request gets a copy of its own. Compiling may take half
a second. It is done where prompts are encoded, so that no step waits for it, and without a lock, so
that no other grammar does.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from milestone_llm.core.allowed_tokens import AllowedTokens
from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams

from .params import StructuredOutputsParams
from .sources import cannot_use, grammar_source
from .token_lists import TokenLists, spellings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

NUM_THREADS = 2
"""Threads in which a server compiles: a cheap grammar need not wait for a large one."""
STACK_BYTES = 512 * 2**20
"""Stack of a thread that compiles. A page of it takes memory only when it is used. A level takes up
to 8 KiB, and the longest grammar has less than 20,000."""
_starting = threading.Lock()
"""Held while a thread with such a stack starts: Python has one size for all new threads."""
MAX_COMPILED = 64
"""Most compiled grammars that are kept for later requests."""
MAX_REGEX_PARTS = 100_000
"""Most parts of a regex, as llguidance counts them: 1 for a plain character, 5 or more for an
optional one. Time and memory grow with their square: 8,000 optional ones take a second."""

_PRINTED = re.compile(r"\n(?:<non-verbose/>|\s*\d+ \| )")
"""Where the reason of an error ends."""
_PLACE_OF_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")

log = logging.getLogger(__name__)


class Grammar(AllowedTokens):
    """The grammar of one request: a matcher that follows its output.

    Args:
        matcher: an `LLMatcher` in its initial state.
        tokens: its `LLTokenizer`.
    """

    def __init__(self, matcher: Any, tokens: Any) -> None:
        self.matcher = matcher
        self.tokens = tokens
        self.vocab_size: int = tokens.vocab_size
        self._words: NDArray[np.uint32] | None = None
        self._followed: list[int] = []
        """Tokens that the matcher has accepted."""

    @property
    def num_allowed(self) -> int:
        """Number of tokens that the last bitmask allows."""
        if self._words is None:
            return self.vocab_size
        return sum(int(word).bit_count() for word in self._words[self._words > 0])

    @property
    def problem(self) -> str | None:
        """Why the last bitmask allows nothing; None: it allows something."""
        if self.num_allowed:
            return None
        error = _reason(self.matcher)
        if not error or "NoExtension" in error:
            return "no text that the model's tokens can spell matches it"
        return error

    def bits(self, output_token_ids: Sequence[int], num_known: int | None = None) -> Tensor:
        """Return the bitmask of allowed tokens, int32 `[ceil(vocab_size / 32)]`.

        After a wrong draft token everything is allowed, because tokens after it are not kept. If
        known tokens break the grammar, or llguidance has given up, nothing is allowed: then the
        request ends with `error`.
        """
        import numpy as np
        import torch

        num_tokens = len(output_token_ids)
        num_known = num_tokens if num_known is None else num_known
        num_taken = self._follow(output_token_ids)
        has_failed = num_taken < num_known or self.matcher.is_error()
        if num_taken < num_tokens and not has_failed:
            return torch.full(((self.vocab_size + 31) // 32,), -1, dtype=torch.int32)
        words = self.next_words()
        if has_failed:
            words[:] = 0
        return torch.from_numpy(words.view(np.int32))

    def continuation(
        self, output_token_ids: Sequence[int], token_ids: list[int], most: int
    ) -> list[int]:
        """Return tokens that the grammar forces; if there are none, those of `token_ids` that may
        follow."""
        self._follow(output_token_ids)
        forced = self.matcher.compute_ff_tokens()[:most]
        forced = forced[: self.matcher.validate_tokens(forced)]
        return forced or token_ids[: self.matcher.validate_tokens(token_ids)]

    def next_words(self) -> NDArray[np.uint32]:
        """Return the bitmask of tokens that the matcher allows next, uint32 `[num_words]`. It needs
        no torch, which HTTP's process has not loaded."""
        import numpy as np  # the playground has none

        self._words = words = np.zeros((self.vocab_size + 31) // 32, np.uint32)
        if self.matcher.is_error():
            return words
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.matcher.is_error():  # it has found out just now, and allows EOS
            words[:] = 0
        places = words.nonzero()[0]
        if len(places) == 1 and self.num_allowed == 1:
            only = 32 * int(places[0]) + int(words[places[0]]).bit_length() - 1
            if not self._accepts(only):
                self._allow_spelling(words)
        return words

    def _accepts(self, token_id: int) -> bool:
        if token_id in self.tokens.eos_tokens:
            return bool(self.matcher.is_accepting())
        return bool(self.matcher.validate_tokens([token_id]))

    def _allow_spelling(self, words: NDArray[np.uint32]) -> None:
        """Allow the first token that spells the forced text, in place of one that is not accepted.

        llguidance tokenizes forced text with the tokenizer. If the text has the name of a special
        token, such as `<think>`, that gives the special token, which the matcher does not accept:
        text is spelled with ordinary tokens. If there are none for it, nothing is allowed.
        """
        words[:] = 0
        text = self.matcher.compute_ff_bytes().decode(errors="ignore")
        for token_id in self.tokens.greedy_tokenize(text)[:1]:
            if self._accepts(token_id):
                words[token_id // 32] = 1 << token_id % 32

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


def _reason(matcher: Any) -> str:
    """Return why a matcher has given up. llguidance also prints lines of the grammar, which may be
    one that the client has not written."""
    text = _PRINTED.split(str(matcher.get_error()), maxsplit=1)[0]
    return _PLACE_OF_SCHEMA.sub("", text)


def _with_deep_stack(make: Callable[[], Any]) -> Any:
    """Call a function in a thread that has `STACK_BYTES`.

    llguidance calls itself for each level of a grammar. With the stack of an ordinary thread, a
    grammar of 4,000 rules of which each needs the next ends the process.
    """
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = ThreadPoolExecutor(1, "grammar")
            made = thread.submit(make)
        finally:
            threading.stack_size(usual)
    with thread:
        return made.result()


def compiling_threads() -> ThreadPoolExecutor:
    """Return the threads in which a server compiles. llguidance compiles without Python's lock."""
    return ThreadPoolExecutor(NUM_THREADS, "grammars")


class Grammars:
    """Makes the grammars of requests. It does no work before the first is asked for.

    Args:
        tokenizer: the model's tokenizer; None: grammars are not possible.
        eos_token_ids: tokens that end an output.
        is_logged: whether to log what is left out of a lenient schema.
        before: called with the parameters of a request before its grammar is compiled.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        is_logged: bool = True,
        before: Callable[[SamplingParams], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.before = before
        self.is_logged = is_logged
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._compiled = OrderedDict[str, Future[Any]]()
        """Matchers in their initial state, by the key of their parameters; the newest is last."""
        self._changing = threading.Lock()
        """Held while `_compiled` is changed."""
        self._building = threading.Lock()
        """Held while tables are built."""
        self._tokens: Any = None
        self._spellings = OrderedDict[Sequence[str], list[tuple[int, ...]]]()
        """Token ids of `bad_words`; the newest are last."""

    def warm_up(self) -> None:
        """Build the tables that all grammars need, if this model can have grammars.

        It takes a second and holds Python's lock, so a server does it before it is ready.
        """
        with contextlib.suppress(InputError):
            self._tables()

    def rule_of(self, params: SamplingParams) -> AllowedTokens | None:
        """Return a rule of the request's own, at the beginning of its output; None: it has none.

        Raises:
            InputError: llguidance or the tokenizer is missing, or the grammar cannot be compiled.
        """
        grammar = self._grammar_of(params)
        if not params.bad_words and params.allowed_token_ids is None:
            return grammar
        banned = self.spellings_of(params)
        return TokenLists(self.vocab_size, params.allowed_token_ids, banned, grammar)

    def spellings_of(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Return the token ids of a request's `bad_words`. The tokenizer is used only where they
        have not been asked for before."""
        if not params.bad_words:
            return []
        with self._building:
            if params.bad_words not in self._spellings:
                found = spellings(self.tokenizer, params.bad_words)
                self._spellings[params.bad_words] = found
                if len(self._spellings) > MAX_COMPILED:
                    self._spellings.popitem(last=False)
            return self._spellings[params.bad_words]

    def _grammar_of(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of `structured_outputs`, if they are asked for."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        if not isinstance(wanted, StructuredOutputsParams):
            raise InputError(
                f"structured_outputs must be StructuredOutputsParams, got {wanted!r:.200}"
            )
        if params.ignore_eos:
            raise InputError("structured_outputs end with EOS: ignore_eos cannot be True")
        if self.before is not None and wanted.key not in self._compiled:
            self.before(params)
        return Grammar(self._matcher(wanted).deep_copy(), self._tables())

    def _matcher(self, wanted: StructuredOutputsParams) -> Any:
        """Return the compiled grammar. If another thread compiles the same one, wait for it."""
        with self._changing:
            future = self._compiled.get(wanted.key)
            if is_mine := future is None:
                future = self._compiled[wanted.key] = Future[Any]()
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        if is_mine:
            try:
                future.set_result(self._compile(wanted))
            except BaseException as error:
                with self._changing:
                    self._compiled.pop(wanted.key, None)
                future.set_exception(error)
        return future.result()

    def _compile(self, params: StructuredOutputsParams) -> Any:
        tokens = self._tables()
        from llguidance import LLMatcher, LLParserLimits

        source = grammar_source(params)
        fuel = {} if params.regex is None else {"initial_lexer_fuel": MAX_REGEX_PARTS}
        limits = LLParserLimits(verbose_errors=False, **fuel)
        matcher = _with_deep_stack(
            partial(LLMatcher, tokens, source.text, log_level=0, limits=limits)
        )
        if matcher.is_error():
            reason = _reason(matcher)
            if "initial lexer" in reason or "initial_lexer" in reason:
                most = f"{limits.initial_lexer_fuel:,}"
                reason = f"its regular expressions have too many parts: at most {most} are taken"
            raise cannot_use(reason)
        first = Grammar(matcher.deep_copy(), tokens)
        first.next_words()
        if first.problem:
            raise cannot_use(first.problem)
        left_out = [f"pattern {each!r}" for each in source.left_out]
        left_out += matcher.get_grammar_warnings()
        if left_out and self.is_logged:
            log.warning("Left out of a lenient schema: %s", ascii(left_out)[:500])
        return matcher

    def _tables(self) -> Any:
        """Return llguidance's tokenizer, built once.

        Raises:
            InputError: llguidance, the tokenizer or an EOS token is missing.
        """
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise InputError(
                'structured outputs need llguidance: pip install "milestone-llm[structured]"'
            ) from None
        with self._building:
            if self._tokens is None:
                if self.tokenizer is None or not self.eos_token_ids:
                    missing = "tokenizer" if self.tokenizer is None else "EOS token"
                    raise InputError(f"structured outputs need a {missing}, and the model has none")
                try:
                    self._tokens = from_tokenizer(
                        self.tokenizer, self.vocab_size, self.eos_token_ids
                    )
                except ValueError as error:
                    text = f"structured outputs cannot use this tokenizer: {error}"
                    raise InputError(text) from None
            return self._tokens
