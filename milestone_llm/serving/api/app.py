"""The endpoints. `Service.answer` answers those that ask for tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from milestone_llm import __version__

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
from .responses_request import ResponsesRequest
from .service import Service


def build_app(service: Service) -> FastAPI:
    """Return the FastAPI application with all endpoints."""
    # FastAPI's page of documentation would load scripts of other servers into this one's origin.
    app = FastAPI(title="milestone-llm", docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_bad_fields)
    app.add_exception_handler(Exception, answer_bug)
    app.router.route_class = counting_route(*service.json_limits)
    engine = service.engine

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await service.answer(body, http.state.cache_salt)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await service.answer(body, http.state.cache_salt)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        try:
            return await service.answer(body.chat(), http.state.cache_salt, body)
        except ApiError as error:
            error.detail = body.in_own_words(error.detail)
            raise

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [service.about_model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service.check_model(name)
        return service.about_model()

    @app.head("/health", include_in_schema=False)
    @app.get("/ping")
    @app.get("/health")
    async def health() -> Json:
        if problem := engine.closed_because or engine.client.problem:
            raise ApiError(503, f"not serving: {problem}")
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @app.get("/load")
    async def load() -> Json:
        return {"server_load": engine.num_open}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Json:
        await service.reset_prefix_cache()
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
