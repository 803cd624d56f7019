"""The endpoints. Each reads top to bottom: let in, tokenize, pass to the engine, answer."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from milestone_llm.core.sampling_params import SamplingParams

from .errors import ApiError, answer_bad_fields, answer_bug, answer_http_error
from .live_page import URL as TRACE_URL
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from .request_json import counting_route
from .response_bodies import Json
from .service import Service


def build_app(service: Service) -> FastAPI:
    """The application."""
    app = FastAPI(title="milestone-llm", docs_url="/docs", redoc_url=None)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_bad_fields)
    app.add_exception_handler(Exception, answer_bug)
    app.router.route_class = counting_route(*service.json_limits)
    engine = service.engine

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        arrival_time = time.perf_counter()
        service.check_model(body.model)
        prompts, n = body.prompts(), body.n or 1
        params = completion_params(body, http.state.cache_salt)
        request = engine.open_request(len(prompts) * n)
        try:
            await service.check_rule(params)
            adds_special = body.add_special_tokens is not False
            token_ids = [await service.encode(prompt, "prompt", adds_special) for prompt in prompts]
            request_id = f"cmpl-{uuid.uuid4().hex}"
            echoed = [""] * request.num_choices
            if body.echo:
                body.check_prompt_logprobs(sum(map(len, token_ids)))
                texts = [
                    prompt if isinstance(prompt, str) else await service.decode(prompt, "prompt")
                    for prompt in prompts
                ]
                echoed = [text for text in texts for _ in range(n)]
            all_params = [params] * len(prompts)
            service.start(request, request_id, token_ids, all_params, body, arrival_time)
        except BaseException:
            request.close()
            raise
        return service.answer(request, request_id, body, echoed)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        arrival_time = time.perf_counter()
        service.check_model(body.model)
        num_logprobs = body.num_logprobs
        request = engine.open_request(body.n or 1)
        try:
            token_ids = await service.encode(
                body.messages,
                "messages",
                template_kwargs=body.chat_template_kwargs,
                tools=body.shown_tools,
            )
            max_tokens = body.max_completion_tokens or body.max_tokens
            if max_tokens is None:
                max_tokens = max(1, service.max_model_len - len(token_ids))
            params = body.sampling_params(max_tokens, num_logprobs, http.state.cache_salt)
            param = "tools" if body.calls_tool else "structured_outputs"
            await service.check_rule(params, param)
            request_id = f"chatcmpl-{uuid.uuid4().hex}"
            service.start(request, request_id, [token_ids], [params], body, arrival_time)
        except BaseException:
            request.close()
            raise
        return service.answer(request, request_id, body, [""] * request.num_choices)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [service.about_model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service.check_model(name)
        return service.about_model()

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Json:
        if problem := engine.closed_because or engine.client.problem:
            raise ApiError(503, f"not serving: {problem}")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        page = engine.metrics.page(await service.reports())
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Json:
        service.check_model(body.model)
        adds_special = body.add_special_tokens is not False
        prompt, param = body.only_prompt()
        tokens = await service.encode(
            prompt, param, adds_special, body.chat_template_kwargs, is_computed=False
        )
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Json:
        service.check_model(body.model)
        return {"prompt": await service.decode(body.tokens, "tokens")}

    if (page := service.page) is not None:

        @app.get("/")
        async def explorer() -> Response:
            return HTMLResponse(page.html, headers=page.headers)

        @app.get(TRACE_URL)
        async def trace() -> Response:
            lines = page.lines(page.subscribe())
            return StreamingResponse(lines, 200, page.headers, "application/x-ndjson")

    return app


def completion_params(body: CompletionRequest, key_salt: str) -> SamplingParams:
    """What the engine is asked for by a completion request.

    Raises:
        ApiError: a value is out of range.
    """
    others: dict[str, Any] = {}
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            text = "max_tokens must be at least 1, got 0 (0 is for echo, to score a prompt)"
            raise ApiError(400, text, param="max_tokens")
        max_tokens = 1
    if body.echo and body.logprobs is not None:
        others["prompt_logprobs"] = body.logprobs
    return body.sampling_params(max_tokens, body.logprobs, key_salt, **others)
