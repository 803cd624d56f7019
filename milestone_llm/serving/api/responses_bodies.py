"""Bodies of answers of `POST /v1/responses`: a response object, and the events that build it.

response.created, response.in_progress
  response.output_item.added                    a message, or a call of a function
    response.content_part.added                 (messages)
    response.output_text.delta ...              or function_call_arguments.delta
    response.output_text.done, content_part.done
  response.output_item.done
response.completed                              or incomplete: cut by its length
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from milestone_llm.frontend.outputs import CompletionOutput, RequestOutput

from .async_engine import ApiRequest
from .calls import AnswerPart, AnswerReader
from .errors import ApiError
from .responses_request import ResponsesRequest

Json = dict[str, Any]


class ResponsesBodies:
    """Writes the answer to one request.

    Args:
        asked: the client's request.
        reader: finds thoughts and calls of functions; None: the answer is words.
    """

    has_logprobs = False

    def __init__(
        self,
        request: ApiRequest,
        request_id: str,
        model: str,
        asked: ResponsesRequest,
        reader: AnswerReader | None,
    ) -> None:
        self._request = request
        self._reader = reader
        self._num_characters = 0
        self._num_tokens = 0
        self._num_events = 0
        self._item: Json | None = None
        """The item that is being written; the last of the output."""
        self._output: list[Json] = []
        text_format = asked.text.format if asked.text is not None else None
        format_ = text_format.model_dump(by_alias=True, exclude_none=True) if text_format else None
        self._response: Json = {
            "id": request_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": model,
            "output": self._output,
            "parallel_tool_calls": bool(asked.parallel_tool_calls),
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": format_ or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the whole answer."""
        for completion in chain.from_iterable(output.outputs for output in outputs):
            for _ in self._take(completion):
                pass
        yield json.dumps(self._response, ensure_ascii=False, separators=(",", ":")).encode()

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the next events of a stream."""
        events = []
        if self._num_events == 0:
            for kind in ("created", "in_progress"):
                events.append(self._event(f"response.{kind}", response=self._response))
        for completion in chain.from_iterable(output.outputs for output in outputs):
            events += list(self._take(completion))
        return b"".join(events)

    def last_events(self) -> bytes:
        """Return what ends a stream: nothing, since `response.completed` has said so."""
        return b""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event of an error within a stream."""
        message = {"code": error.code, "message": error.detail, "param": error.param}
        return self._event("error", **message)

    # -- what is new ---------------------------------------------------------------------------

    def _take(self, completion: CompletionOutput) -> Iterator[bytes]:
        is_ended = completion.finish_reason not in (None, "error")  # an error has its own event
        if self._reader is None:
            parts = [AnswerPart(completion.text[self._num_characters :])]
            self._num_characters = len(completion.text)
        else:
            parts = self._reader.read(completion.text, is_ended)
        self._num_tokens = completion.num_tokens
        for part in parts:
            if part.call is not None:
                yield from self._add_to_call(part)
            elif part.thoughts:
                yield from self._add_thoughts(part.thoughts)
            elif part.words:
                yield from self._add_words(part.words)
        if is_ended:
            yield from self._end(is_cut=completion.finish_reason == "length")

    def _add_thoughts(self, thoughts: str) -> Iterator[bytes]:
        if self._item is None:
            part = {"type": "reasoning_text", "text": ""}
            yield from self._open({"type": "reasoning", "summary": [], "content": [part]}, "rs")
        self._output[-1]["content"][0]["text"] += thoughts
        yield self._of_item("reasoning_text.delta", content_index=0, delta=thoughts)

    def _add_words(self, words: str) -> Iterator[bytes]:
        if self._item is None or self._item["type"] != "message":
            yield from self._close("completed")
            yield from self._open({"type": "message", "role": "assistant", "content": []}, "msg")
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._of_item("content_part.added", content_index=0, part=dict(part))
            self._output[-1]["content"].append(part)
        self._output[-1]["content"][0]["text"] += words
        if words:
            yield self._of_item("output_text.delta", content_index=0, delta=words, logprobs=[])

    def _add_to_call(self, part: AnswerPart) -> Iterator[bytes]:
        if part.name is not None:
            yield from self._close("completed")
            call = {"type": "function_call", "call_id": f"call_{uuid.uuid4().hex}"}
            yield from self._open({**call, "name": part.name, "arguments": ""}, "fc")
        if part.arguments:
            self._output[-1]["arguments"] += part.arguments
            yield self._of_item("function_call_arguments.delta", delta=part.arguments)

    def _open(self, item: Json, prefix: str) -> Iterator[bytes]:
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._output.append(self._item)
        yield self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=self._item
        )

    def _close(self, status: str) -> Iterator[bytes]:
        if (item := self._item) is None:
            return
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            text = part["text"]
            yield self._of_item("output_text.done", content_index=0, text=text, logprobs=[])
            yield self._of_item("content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            yield self._of_item("reasoning_text.done", content_index=0, text=text)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("function_call_arguments.done", **done)
        yield self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=item
        )
        self._item = None

    def _end(self, is_cut: bool) -> Iterator[bytes]:
        if not self._output:
            yield from self._add_words("")
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response |= {"status": status, "usage": self._usage()}
        yield self._event(f"response.{status}", response=self._response)

    def _usage(self) -> Json:
        (state,) = self._request.states
        num_prompt_tokens = len(state.prompt_token_ids)
        has_thoughts = any(item["type"] == "reasoning" for item in self._output)  # not counted
        details = {} if has_thoughts else {"output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": state.metrics.num_cached_tokens},
            "output_tokens": self._num_tokens,
            **details,
            "total_tokens": num_prompt_tokens + self._num_tokens,
        }

    # -- events --------------------------------------------------------------------------------

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
