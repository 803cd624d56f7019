"""From a prompt to a request: encoded, checked, numbered, seeded."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from milestone_llm.core.errors import InputError
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.structured.grammars import Grammars

from .inputs import (
    Prompt,
    Prompts,
    as_list,
    check_params,
    check_prompt,
    check_request_id,
    encode_prompt,
    with_whole_vocabulary,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt, and the parameters with which to go on from it."""

    token_ids: list[int]
    params: SamplingParams


class InputProcessor:
    """Makes requests of prompts. Call `encode` first, in any thread. Then call `make` in a change
    of the engine, since each request gets a number of its own.

    Args:
        seed: seeds the requests that bring no seed of their own.
        is_taken: whether an id belongs to a request that is unfinished or undelivered.
        validate: the scheduler's `validate`, which refuses requests that no step could compute.
        aging_seconds: waiting this long makes a request more urgent by 1; None: waiting does not
            count.
        grammars: grammars of structured outputs; None: made here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        is_taken: Callable[[str], bool],
        validate: Callable[[Request], None],
        aging_seconds: float | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.is_taken = is_taken
        self.validate = validate
        self.aging_seconds = aging_seconds
        self.grammars = grammars or Grammars(tokenizer, vocab_size, eos_token_ids)
        self._encoding = threading.RLock()  # a tokenizer is not thread-safe
        self._began = perf_counter()
        self.num_arrivals = 0

    # -- may take its time: no step waits for it ---------------------------------------------

    def encode_all(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        chat: bool,
        **template: Any,
    ) -> list[EncodedPrompt]:
        """Return the token ids of several prompts, with the parameters of each.

        Args:
            template: `template_kwargs` and `tools`, as `render_chat` takes them.

        Raises:
            InputError: one of them is bad.
        """
        many = as_list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if not isinstance(sampling_params, Sequence):  # other types are refused below
            sampling_params = [sampling_params] * len(many)
        if len(sampling_params) != len(many):
            raise InputError(f"{len(many)} prompts, but {len(sampling_params)} sampling_params")
        return [
            self.encode(prompt, params, chat, **template)
            for prompt, params in zip(many, sampling_params, strict=True)
        ]

    def encode(
        self, prompt: Prompt, params: SamplingParams, chat: bool, **template: Any
    ) -> EncodedPrompt:
        """Return the token ids of a prompt, after a check of ids and parameters for the model.

        Raises:
            InputError: bad input; the message states the number and the limit.
        """
        try:
            with self._encoding:
                token_ids = encode_prompt(self.tokenizer, prompt, chat, **template)
                if isinstance(params, SamplingParams) and self.tokenizer is not None:
                    self.grammars.spellings_of(params)
        finally:  # not `with`: Ctrl-C in the very moment in which it ends would leave the lock held
            with contextlib.suppress(RuntimeError):
                self._encoding.release()
        check_prompt(token_ids, self.vocab_size, self.max_model_len)
        check_params(params, self.vocab_size, self.tokenizer, self.eos_token_ids)
        self.grammars.rule_of(params)  # compiled here, or refused
        return EncodedPrompt(token_ids, with_whole_vocabulary(params, self.vocab_size))

    # -- within a change of the engine -------------------------------------------------------

    def make_all(self, prompts: Sequence[EncodedPrompt]) -> list[list[Request]]:
        """Return the requests of each of several prompts. Queues none of them.

        Raises:
            InputError: `make` refuses one of the prompts; then no request is made.
        """
        num_arrivals = self.num_arrivals
        try:
            return [self.make(token_ids, params) for token_ids, params in prompts]
        except BaseException:
            self.num_arrivals = num_arrivals  # later requests get the seeds they would have had
            raise

    def make(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """Return a numbered and seeded request for each completion of a prompt. Queues none.

        Args:
            token_ids: the prompt's. Token ids and parameters have been checked for this model.

        Raises:
            InputError: the id is taken, or no step could ever compute the request.
        """
        arrival = self.num_arrivals
        if request_id is None:
            request_id = self._free_id(f"r{arrival}")
        check_request_id(request_id, self.is_taken)
        seed = params.seed
        if seed is None:
            seed = random.Random(f"{self.seed}/{arrival}").getrandbits(64)
        parts = (token_ids, params, arrival, self._aged(priority), seed, self.eos_token_ids)
        requests = build_requests([request_id], *parts, self.grammars)
        self.validate(requests[0])  # before n completions are made
        if params.n > 1:
            further = [self._free_id(f"{request_id}/{index}") for index in range(1, params.n)]
            requests = build_requests([request_id, *further], *parts, self.grammars)
        self.num_arrivals += 1
        return requests

    def _aged(self, priority: int) -> float:
        """Return a priority that counts the request's age, and is right at any later time.

        At time t a request has the priority `priority - (t - arrival) / aging_seconds`. All
        requests age alike, so the order of two requests never changes. The part with t is the same
        for all and is left out here: the remaining number gives the same order.
        """
        if self.aging_seconds is None:
            return priority
        return priority + (perf_counter() - self._began) / self.aging_seconds

    def _free_id(self, request_id: str) -> str:
        while self.is_taken(request_id):
            request_id += "_"
        return request_id


def build_requests(
    request_ids: Sequence[str],
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    arrival: int,
    priority: float,
    seed: int,
    eos_token_ids: frozenset[int],
    grammars: Grammars,
) -> list[Request]:
    """Return a request for each completion of a prompt; only the first gives the prompt's logprobs.

    Args:
        request_ids: the id of each completion.
        seed: the seed of the first completion; each further one has the next number.
        grammars: say which tokens are allowed, for structured outputs.
    """
    of_further = params if len(request_ids) == 1 else replace(params, prompt_logprobs=None)
    return [
        Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            sampling_params=of_further if index else params,
            arrival=arrival,
            priority=priority,
            seed=(seed + index) % 2**64,
            eos_token_ids=eos_token_ids,
            allowed_tokens=grammars.rule_of(params),
            index=index,
        )
        for index, request_id in enumerate(request_ids)
    ]
