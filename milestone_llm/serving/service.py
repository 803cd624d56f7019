"""What the endpoints work with: the tokenizer, the checks of prompts, figures, the page."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.inputs import encode_prompt

from .async_engine import ApiRequest, AsyncEngine
from .engine_client import EngineReport, EngineRequest
from .errors import ApiError
from .live_page import LivePage
from .protocol import Sampling
from .response_bodies import Json, ResponseBodies, token_decoder, token_speller

REPORT_SECONDS = 1.0
"""An engine that takes longer over a step, or stands in a debugger, is not waited for."""


class Service:
    """What the endpoints work with."""

    def __init__(self, engine: AsyncEngine, has_page: bool = True) -> None:
        self.engine = engine
        info = engine.client.info
        self.model = info.model_name
        self.max_model_len = info.max_model_len
        self.created = int(time.time())
        # A copy: the engine's thread may decode with this one. One thread: a tokenizer is not made
        # for several.
        self._tokenizer = copy.deepcopy(info.tokenizer)
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        words = self._tokenizer.get_vocab() if self._tokenizer else {}
        self._longest_token = max(map(len, words), default=1)
        self.decode_token = token_decoder(self._tokenizer)
        self.spell_token = token_speller(self._tokenizer)
        self.page = LivePage(engine, copy.deepcopy(info.tokenizer)) if has_page else None

    def about_model(self) -> Json:
        """The model, as `/v1/models` describes it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "milestone_llm",
            "max_model_len": self.max_model_len,
        }

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model than the one that is served."""
        if name not in (None, self.model):
            text = f"there is no model {name!r}; this server has {self.model!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    async def encode(self, prompt: Any, param: str) -> list[int]:
        """Token ids of a text, of messages, or of token ids.

        Args:
            param: the field of the request that has it.

        Raises:
            ApiError: it is no prompt for this model.
        """
        run = asyncio.get_running_loop().run_in_executor
        token_ids: list[int] = prompt
        if isinstance(prompt, str) or any(isinstance(part, dict) for part in prompt):
            self._check_length(prompt, param)
            try:
                token_ids = await run(
                    self._tokenizing, encode_prompt, self._tokenizer, prompt, False
                )
            except InputError as error:
                raise ApiError(400, str(error), param=param) from None
        return token_ids

    async def encode_prompt(self, prompt: Any, param: str) -> list[int]:
        """As `encode`, for a prompt that is to be computed.

        Raises:
            ApiError: it is no prompt for this model, or as long as no request may be.
        """
        token_ids = await self.encode(prompt, param)
        if not token_ids:
            raise ApiError(400, "the prompt is empty: it needs at least 1 token", param=param)
        if len(token_ids) >= self.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens", param)
        return token_ids

    def _check_length(self, prompt: str | list[dict[str, Any]], param: str) -> None:
        """Refuse a text that no tokenizing makes short enough; others would wait for that."""
        texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
        num_characters = sum(map(len, texts))
        if num_characters > self.max_model_len * self._longest_token:
            raise self._too_long(f"{num_characters:,} characters", param)

    def _too_long(self, length: str, param: str) -> ApiError:
        text = f"the prompt has {length}, but max_model_len={self.max_model_len} tokens leaves "
        text += f"room for at most {self.max_model_len - 1} and one token of output"
        return ApiError(400, text, param=param, code="context_length_exceeded")

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids.

        Raises:
            ApiError: there is no tokenizer, or no such token.
        """
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: there is no text")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < len(self._tokenizer):
            ends = f"got {min(token_ids)} to {max(token_ids)}"
            error = f"token ids are 0 to {len(self._tokenizer) - 1}, {ends}"
            raise ApiError(400, error, param="tokens")
        run = asyncio.get_running_loop().run_in_executor
        text: str = await run(self._tokenizing, self._tokenizer.decode, token_ids)
        return text

    async def reports(self) -> list[EngineReport] | None:
        """The figures of each engine; None if they do not answer."""
        answer = asyncio.wrap_future(self.engine.client.report())
        try:
            return await asyncio.wait_for(answer, REPORT_SECONDS)
        except asyncio.TimeoutError:
            return None

    def start(
        self,
        request: ApiRequest,
        request_id: str,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        body: Sampling,
        arrival_time: float,
    ) -> None:
        """Pass an API request to the engine: a request for each prompt."""
        names = [request_id] + [f"{request_id}-{index}" for index in range(1, len(prompts))]
        requests = [
            EngineRequest(name, prompt, each, body.priority or 0, bool(body.stream), arrival_time)
            for name, prompt, each in zip(names, prompts, params, strict=True)
        ]
        request.start(requests, body.deadline)

    def bodies(
        self,
        request: ApiRequest,
        request_id: str,
        is_chat: bool,
        prompts: Sequence[str],
        body: Sampling,
    ) -> ResponseBodies:
        """Writes the answer to an API request."""
        tokens = self.decode_token, self.spell_token
        bodies = ResponseBodies(request, request_id, self.model, is_chat, prompts, *tokens)
        bodies.wants_usage = body.wants_usage_event
        return bodies
