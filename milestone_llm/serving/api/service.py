"""What the endpoints share: tokenizer, checks of prompts, engine reports, explorer page."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, cast

from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.inputs import (
    check_length,
    check_params,
    check_priority,
    check_vocabulary,
    encode_prompt,
)
from milestone_llm.structured.grammars import Grammars, compiling_threads

from ..engine.client import EngineReport, EngineRequest
from .async_engine import ApiRequest, AsyncEngine
from .calls import BEGIN_OF_THOUGHTS, AnswerReader, CallWriting, Thoughts, knows_thoughts
from .errors import ApiError, deadline_passed, field_named_first
from .live_page import LivePage
from .protocol import ChatRequest, CompletionRequest, Message, num_characters
from .response_bodies import Json, ResponseBodies
from .responses import ApiResponse, Bodies
from .responses_bodies import ResponsesBodies
from .responses_request import ResponsesRequest
from .token_texts import Vocabulary

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | list[int] | list[Message]

REPORT_SECONDS = 1.0
"""Seconds to wait for an engine's report. A long step, or a debugger, may take more."""

NUM_LAST_TOKENS = 16
"""Tokens at the end of a prompt in which `<think>` is looked for."""
MAX_ITEMS = 2**18
"""Most texts, lists and objects in a body, and most tokens of several prompts. To parse and check
so many takes the event loop a tenth of a second, in which other requests wait."""


class Service:
    """Answers the requests of the endpoints."""

    def __init__(
        self, engine: AsyncEngine, has_page: bool = True, has_reasoning: bool = True
    ) -> None:
        self.engine = engine
        info = engine.client.info
        self.model = info.model_name
        self.max_model_len = info.max_model_len
        self.created = int(time.time())
        # A copy: the engine's thread may decode with the original. One thread: tokenizers are not
        # thread-safe.
        self._tokenizer = copy.deepcopy(info.tokenizer)
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        words = self._tokenizer.get_vocab() if self._tokenizer else {}
        self._max_characters = self.max_model_len * max(map(len, words), default=1)
        # A message with one part of content is hardly shorter than a token: two objects, a list,
        # eight texts. Prompts of token ids have one value for each token.
        num_parts = min(16 * self.max_model_len + engine.max_choices, MAX_ITEMS)
        num_tokens = min(self.max_model_len * engine.max_choices, MAX_ITEMS)
        num_values = num_parts + max(num_tokens, self.max_model_len)
        self.json_limits = num_parts, num_values
        self._vocabulary = Vocabulary(self._tokenizer)
        self._writing = CallWriting(self._tokenizer, sorted(info.eos_token_ids))
        self._has_thoughts = has_reasoning and knows_thoughts(self._tokenizer)
        self._has_told_of_tools = False
        # Compiled in a thread of their own, so that tokenizing need not wait for it.
        # What is left out of a schema is logged by the engine, which compiles it, too.
        self._grammars = Grammars(
            copy.deepcopy(info.tokenizer), info.vocab_size, info.eos_token_ids, is_logged=False
        )
        self._grammars.warm_up()
        self._compiling = compiling_threads()
        self.page = LivePage(engine, copy.deepcopy(info.tokenizer)) if has_page else None

    def about_model(self) -> Json:
        """Return the description of the model for `/v1/models`."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "milestone_llm",
            "max_model_len": self.max_model_len,
        }

    def check_model(self, name: str | None) -> None:
        """Reject a request for a model that is not served.

        Raises:
            ApiError: 404.
        """
        if name not in (None, self.model):
            text = f"there is no model {name!r}; this server has {self.model!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    # -- completions and chats ---------------------------------------------------------------

    async def answer(
        self,
        body: CompletionRequest | ChatRequest,
        key_salt: str,
        asked: ResponsesRequest | None = None,
    ) -> ApiResponse:
        """Admit a request, tokenize its prompts, pass them to the engine, and return the answer.

        Args:
            key_salt: salt of the client's key.
            asked: the request of `/v1/responses` that asks for this chat; it gets its own answer.

        Raises:
            ApiError: there is no room for the request, or a value in it is not valid.
        """
        arrival_time = time.perf_counter()
        self.check_model(body.model)
        prompts, n = body.prompts(), body.n or 1
        request = self.engine.open_request(len(prompts) * n, key_salt)
        try:
            prepared = self._prepare(body, prompts, key_salt)
            token_ids, params = await asyncio.wait_for(prepared, body.deadline)
            request_id = f"{body.id_prefix}-{uuid.uuid4().hex}"
            echoed = [text for text in await self._echoed(body, token_ids) for _ in range(n)]
            thoughts = await self._thoughts(body, token_ids[0])
            self._start(request, request_id, token_ids, params, body, arrival_time)
        except BaseException as error:
            request.close()
            if isinstance(error, asyncio.TimeoutError):
                raise deadline_passed(body.deadline) from None
            raise

        def reader() -> AnswerReader | None:
            if isinstance(body, CompletionRequest):
                return None
            return body.reader(self._writing, thoughts)

        bodies: Bodies = ResponseBodies(
            request, request_id, self.model, body, echoed, self._vocabulary, reader
        )
        if asked is not None:
            bodies = ResponsesBodies(request, request_id, self.model, asked, reader())
        return ApiResponse(request, bodies, bool(body.stream), self._tokenizing)

    async def _prepare(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        key_salt: str,
    ) -> tuple[list[list[int]], SamplingParams]:
        """Return the token ids of each prompt, and the parameters. The grammar is compiled.

        Raises:
            ApiError: a value is not valid.
        """
        token_ids = [await self.encode(prompt, **body.encoding()) for prompt in prompts]
        self._tell_of_tools(body)
        room = max(1, self.max_model_len - len(token_ids[0]))
        params = body.params(room, key_salt, self._writing)
        await self._check_rule(params, body)
        return token_ids, params

    def _tell_of_tools(self, body: CompletionRequest | ChatRequest) -> None:
        """Log once that the chat template does not have the tools, so the system message does."""
        has_tools = isinstance(body, ChatRequest) and body.calls is not None
        if has_tools and self._writing.is_general and not self._has_told_of_tools:
            self._has_told_of_tools = True
            log.warning(
                "The chat template has no form for calls of functions that can be read: tools are "
                "described in the system message, and calls are JSON"
            )

    async def _thoughts(self, body: CompletionRequest | ChatRequest, prompt: list[int]) -> Thoughts:
        """Return whether a model may think before it answers, or the prompt has begun it."""
        if not self._has_thoughts or isinstance(body, CompletionRequest):
            return "none"
        end = await self.decode(prompt[-NUM_LAST_TOKENS:], "messages")
        return "begun" if end.rstrip().endswith(BEGIN_OF_THOUGHTS) else "possible"

    async def _echoed(
        self, body: CompletionRequest | ChatRequest, prompts: Sequence[list[int]]
    ) -> list[str]:
        """Return the text with which the answer to each prompt begins."""
        if not (isinstance(body, CompletionRequest) and body.echo):
            return [""] * len(prompts)
        body.check_prompt_logprobs(sum(map(len, prompts)))
        return [
            given if isinstance(given, str) else await self.decode(given, "prompt")
            for given in body.prompts()
        ]

    def _start(
        self,
        request: ApiRequest,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        body: CompletionRequest | ChatRequest,
        arrival_time: float,
    ) -> None:
        """Pass an API request to the engine, as one request for each prompt.

        Raises:
            ApiError: a prompt or a parameter is not valid for this model.
        """
        names = [request_id] + [f"{request_id}-{index}" for index in range(1, len(prompts))]
        info = self.engine.client.info
        priority, is_stream = body.priority or 0, bool(body.stream)
        requests = [
            EngineRequest(name, prompt, params, priority, is_stream, arrival_time)
            for name, prompt in zip(names, prompts, strict=True)
        ]
        try:
            check_priority(priority)
            for prompt in prompts:
                check_vocabulary("the prompt", prompt, info.vocab_size)
            check_params(params, info.vocab_size, info.tokenizer, info.eos_token_ids)
        except InputError as error:
            named = field_named_first(str(error))
            param = named if named in type(body).model_fields else body.encoding()["param"]
            raise ApiError(400, str(error), param=param) from None
        if self.page is not None:
            for name, text in zip(names, body.prompt_texts(), strict=False):
                self.page.name(name, text)
        request.start(requests, is_stream, body.deadline, body.rule_param)

    async def _check_rule(
        self, params: SamplingParams, body: CompletionRequest | ChatRequest
    ) -> None:
        """Compile the grammar that constrains the answer, if there is one.

        Raises:
            ApiError: it cannot be compiled. The message names the part that cannot be.
        """
        if params.structured_outputs is None:
            return
        try:
            await self._compile(params)
        except InputError as refusal:
            error, param, name = refusal, body.rule_param, body.rule_param
            for part in body.rule_parts():
                try:
                    await self._compile(SamplingParams(structured_outputs=part.params))
                except InputError as of_part:
                    error, param, name = of_part, part.param, part.name
                    break
            text = str(error).replace("structured outputs", name, 1)
            raise ApiError(400, text, param=param) from None

    async def _compile(self, params: SamplingParams) -> None:
        run = asyncio.get_running_loop().run_in_executor
        await run(self._compiling, self._grammars.rule_of, params)

    # -- tokens and text, figures ------------------------------------------------------------

    async def encode(
        self,
        prompt: Prompt,
        param: str,
        adds_special: bool = True,
        template_kwargs: Json | None = None,
        tools: list[Json] | None = None,
        is_computed: bool = True,
    ) -> list[int]:
        """Return the token ids of a text, of messages, or of token ids.

        Args:
            param: name of the field that has the prompt.
            adds_special: whether to add special tokens to a text.
            template_kwargs: variables of the chat template, for messages.
            tools: functions that the chat template shows to the model.
            is_computed: whether the engine will compute it; if not, its tokens are only counted.

        Raises:
            ApiError: it is not a valid prompt for this model, or too long.
        """
        if isinstance(prompt, list) and not isinstance(next(iter(prompt), None), Message):
            token_ids = cast(list[int], prompt)
        else:
            text = cast(str | list[Message], prompt)
            options = param, adds_special, template_kwargs, tools
            run = asyncio.get_running_loop().run_in_executor
            try:
                token_ids = await run(self._tokenizing, self._encode, text, *options)
            except InputError as error:
                named = str(error).split()[0].rstrip(":")
                param = named if named in ("chat_template_kwargs", "tools") else param
                raise ApiError(400, str(error), param=param) from None
        try:
            if is_computed:
                check_length(token_ids, self.max_model_len)
        except InputError as error:
            code = "context_length_exceeded" if token_ids else None
            raise ApiError(400, str(error), param=param, code=code) from None
        return token_ids

    def _encode(
        self,
        prompt: str | list[Message],
        param: str,
        adds_special: bool,
        template_kwargs: Json | None,
        tools: list[Json] | None,
    ) -> list[int]:
        self._check_length(prompt, param, {**(template_kwargs or {}), "tools": tools})
        if isinstance(prompt, str):
            return encode_prompt(self._tokenizer, prompt, False, adds_special)
        messages = [each.as_dict() for each in prompt]
        return encode_prompt(self._tokenizer, messages, False, True, template_kwargs, tools)

    def _check_length(self, prompt: str | list[Message], param: str, variables: Json) -> None:
        """Reject a text that is too long in any tokenization, so that others need not wait for
        it."""
        if isinstance(prompt, str):
            count = len(prompt)
        elif len(prompt) >= self.max_model_len:
            raise self._too_long(f"{len(prompt):,} messages", param)
        else:
            count = sum(message.num_characters for message in prompt)
            count += num_characters(variables)
        if count > self._max_characters:
            raise self._too_long(f"{count:,} characters", param)

    def _too_long(self, length: str, param: str) -> ApiError:
        text = f"the prompt has {length}, but max_model_len={self.max_model_len} tokens leaves "
        text += f"room for at most {self.max_model_len - 1} and one token of output"
        return ApiError(400, text, param=param, code="context_length_exceeded")

    async def decode(self, token_ids: Sequence[int], param: str) -> str:
        """Return the text of token ids.

        Args:
            param: name of the field that has them.

        Raises:
            ApiError: there is no tokenizer, a token id is not valid, or there are too many.
        """
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: there is no text")
        if len(token_ids) > self.max_model_len:
            error = f"{param} holds {len(token_ids)} tokens, and a text of this model at most "
            raise ApiError(400, f"{error}{self.max_model_len}", param=param)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < len(self._tokenizer):
            ends = f"got {min(token_ids)} to {max(token_ids)}"
            error = f"token ids are 0 to {len(self._tokenizer) - 1}, {ends}"
            raise ApiError(400, error, param=param)
        run = asyncio.get_running_loop().run_in_executor
        text: str = await run(self._tokenizing, self._tokenizer.decode, token_ids)
        return text

    async def reports(self) -> list[EngineReport] | None:
        """Return a report of each engine; None if they do not answer within `REPORT_SECONDS`."""
        answer = asyncio.wrap_future(self.engine.client.report())
        try:
            return await asyncio.wait_for(answer, REPORT_SECONDS)
        except asyncio.TimeoutError:
            return None

    async def reset_prefix_cache(self) -> None:
        """Forget all cached KV, of all engines.

        Raises:
            ApiError: an engine has no prefix cache, or cannot forget it now.
        """
        done = await asyncio.wrap_future(self.engine.client.reset_prefix_cache())
        if None in done:
            raise ApiError(400, "this engine has no prefix cache: M4 and M5 have one")
        if not all(done):
            raise ApiError(409, "the prefix cache is in use: wait until no request runs")
