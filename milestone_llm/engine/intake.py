"""From a prompt to a queued request: encoded, checked, numbered, seeded. A part of the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from .detokenizer import Detokenizer
from .inputs import Prompt, check_params, check_priority, check_prompt, encode_prompt, is_one_prompt
from .request import Request
from .sampling_params import SamplingParams


class RequestIntake:
    """What `LLMEngine` does with input, before any step."""

    milestone: ClassVar[str]
    can_share_kv: ClassVar[bool]
    config: Any
    tokenizer: Any
    scheduler: Any
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    requests: dict[str, Request]
    _num_arrivals: int

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        chat: bool,
    ) -> list[Request]:
        many: Sequence[Any] = [prompts] if is_one_prompt(prompts) else prompts
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(many)
        if len(sampling_params) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(sampling_params)} sampling_params")
        num_arrivals = self._num_arrivals
        try:
            requests = [
                self._make_request(prompt, params, None, 0, chat)
                for prompt, params in zip(many, sampling_params, strict=True)
            ]
        except ValueError:
            self._num_arrivals = num_arrivals  # later requests get the seeds they would have had
            raise
        for request in requests:  # all of them are good: queue them
            self._enqueue(request)
        return requests

    def _make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        chat: bool,
    ) -> Request:
        """A validated request, not yet queued."""
        token_ids = encode_prompt(self.tokenizer, prompt, chat)
        check_prompt(token_ids, self.vocab_size, self.max_model_len)
        check_params(params, self.vocab_size, self.tokenizer, self.eos_token_ids)
        check_priority(priority)
        if params.n > 1 and not self.can_share_kv:
            raise ValueError(
                f"n={params.n}: {self.milestone} cannot share the KV of a prompt among "
                f"completions, m3_paged and later can; here, add the prompt {params.n} times"
            )
        arrival = self._num_arrivals
        if request_id is None:
            request_id = f"r{arrival}"
            while request_id in self.requests:
                request_id += "_"
        elif request_id in self.requests:
            raise ValueError(f"request_id {request_id!r} belongs to an unfinished request")
        seed = params.seed
        if seed is None:
            seed = random.Random(f"{self.config.seed}/{arrival}").getrandbits(64)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival=arrival,
            priority=priority,
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            detokenizer=self._detokenizer(params),
        )
        self.scheduler.validate(request)
        self._num_arrivals += 1
        return request

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        return Detokenizer(self.tokenizer, list(params.stop)) if self.tokenizer else None

    def _enqueue(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.scheduler.add(request)
