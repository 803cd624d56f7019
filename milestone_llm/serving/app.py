"""The endpoints. Each reads top to bottom: let in, tokenize, hand over, answer."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from milestone_llm.frontend.inputs import encode_prompt
from milestone_llm.core.sampling_params import SamplingParams

from .answers import Answer
from .desk import Call, Desk
from .engine_client import EngineReport, EngineRequest
from .errors import ApiError, answer_bad_fields, answer_bug, answer_http_error
from .live_page import URL as TRACE_URL
from .live_page import LivePage
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from .replies import Json, Replies, token_decoder, token_speller

REPORT_SECONDS = 1.0
"""An engine that takes longer over a step, or stands in a debugger, is not waited for."""


class Service:
    """What the endpoints work with."""

    def __init__(self, desk: Desk, has_page: bool = True) -> None:
        self.desk = desk
        info = desk.engine.info
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
        self.page = LivePage(desk, copy.deepcopy(info.tokenizer)) if has_page else None

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
            except ValueError as error:
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
        answer = asyncio.wrap_future(self.desk.engine.report())
        try:
            return await asyncio.wait_for(answer, REPORT_SECONDS)
        except asyncio.TimeoutError:
            return None

    def submit(
        self,
        call: Call,
        request_id: str,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        body: Sampling,
        arrival_time: float,
    ) -> None:
        """Hand a call to the engine: a request for each prompt."""
        names = [request_id] + [f"{request_id}-{place}" for place in range(1, len(prompts))]
        requests = [
            EngineRequest(name, prompt, each, body.priority or 0, bool(body.stream), arrival_time)
            for name, prompt, each in zip(names, prompts, params, strict=True)
        ]
        call.submit(requests, body.deadline)

    def replies(
        self, call: Call, request_id: str, is_chat: bool, prompts: Sequence[str], body: Sampling
    ) -> Replies:
        """Writes the answers to a call."""
        tokens = self.decode_token, self.spell_token
        replies = Replies(call, request_id, self.model, is_chat, prompts, *tokens)
        replies.wants_usage = body.wants_usage_event
        return replies


def build_app(service: Service) -> FastAPI:
    """The application."""
    app = FastAPI(title="milestone-llm", docs_url="/docs", redoc_url=None)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_bad_fields)
    app.add_exception_handler(Exception, answer_bug)
    desk = service.desk

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrival_time = time.perf_counter()
        service.check_model(body.model)
        prompts, n = body.prompts(), body.n or 1
        params = completion_params(body, request.state.cache_salt)
        call = desk.open_call(len(prompts) * n)
        try:
            token_ids = [await service.encode_prompt(prompt, "prompt") for prompt in prompts]
            request_id = f"cmpl-{uuid.uuid4().hex}"
            echoed = [""] * call.num_choices
            if body.echo:
                texts = [
                    prompt if isinstance(prompt, str) else await service.decode(prompt)
                    for prompt in prompts
                ]
                echoed = [text for text in texts for _ in range(n)]
            all_params = [params] * len(prompts)
            service.submit(call, request_id, token_ids, all_params, body, arrival_time)
        except BaseException:
            call.close()
            raise
        replies = service.replies(call, request_id, False, echoed, body)
        replies.drops_output = body.max_tokens == 0
        return Answer(call, replies, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        arrival_time = time.perf_counter()
        service.check_model(body.model)
        messages, num_logprobs = body.as_texts(), body.num_logprobs
        call = desk.open_call(body.n or 1)
        try:
            token_ids = await service.encode_prompt(messages, "messages")
            max_tokens = body.max_completion_tokens or body.max_tokens
            if max_tokens is None:
                max_tokens = max(1, service.max_model_len - len(token_ids))
            salt = request.state.cache_salt
            params = body.sampling_params(max_tokens, num_logprobs, cache_salt=salt)
            request_id = f"chatcmpl-{uuid.uuid4().hex}"
            service.submit(call, request_id, [token_ids], [params], body, arrival_time)
        except BaseException:
            call.close()
            raise
        prompts = [""] * call.num_choices
        replies = service.replies(call, request_id, True, prompts, body)
        return Answer(call, replies, bool(body.stream))

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [service.about_model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service.check_model(name)
        return service.about_model()

    @app.get("/health")
    async def health() -> Json:
        if problem := desk.closed_because or desk.engine.problem:
            raise ApiError(503, f"not serving: {problem}")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        page = desk.metrics.page(await service.reports())
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Json:
        service.check_model(body.model)
        if (body.prompt is None) == (not body.messages):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        messages = [each.as_text(place) for place, each in enumerate(body.messages or [])]
        tokens = await service.encode(messages or body.prompt, "prompt")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Json:
        service.check_model(body.model)
        return {"prompt": await service.decode(body.tokens)}

    if (page := service.page) is not None:

        @app.get("/")
        async def explorer() -> Response:
            return HTMLResponse(page.html)

        @app.get(TRACE_URL)
        async def trace() -> Response:
            lines = page.lines(page.subscribe())
            return StreamingResponse(lines, media_type="application/x-ndjson")

    return app


def completion_params(body: CompletionRequest, cache_salt: str) -> SamplingParams:
    """What the engine is asked for by a completion request.

    Raises:
        ApiError: a value is out of range.
    """
    others: dict[str, Any] = {"cache_salt": cache_salt}
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            text = "max_tokens must be at least 1, got 0 (0 is for echo, to score a prompt)"
            raise ApiError(400, text, param="max_tokens")
        max_tokens = 1
    if body.echo and body.logprobs is not None:
        others["prompt_logprobs"] = body.logprobs
    return body.sampling_params(max_tokens, body.logprobs, **others)
