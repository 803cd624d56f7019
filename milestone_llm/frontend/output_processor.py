"""From tokens to what callers see: text, stop strings, `RequestOutput`s, times.

The core hands out token ids. What a caller knows of a request is kept here, and brought up to date
with them; a request that a stop string has ended is reported, so that the core can be told.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from milestone_llm.core.outputs import EngineCoreOutput, Logprob
from milestone_llm.core.request import Request

from .detokenizer import Detokenizer, decode_whole
from .output_queue import OutputQueue
from .outputs import CompletionOutput, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompletionState:
    """What is known of one completion. `token_ids` is the truth, the rest follows from it.

    Args:
        request: the core's; its tokens may be ahead of those that were processed.
        makes_text: whether text is made token by token; if not, all at once when it is asked for.
    """

    def __init__(
        self, request: Request, tokenizer: PreTrainedTokenizerBase | None, makes_text: bool
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and makes_text:
            self._detokenizer = Detokenizer(tokenizer, list(request.sampling_params.stop))

    @property
    def is_stopped(self) -> bool:
        """Whether the text has come to a stop string."""
        return self._detokenizer is not None and self._detokenizer.is_stopped

    def take(self, output: EngineCoreOutput, now: float) -> None:
        """Take in new tokens, up to the one that completes a stop string."""
        for place, token_id in enumerate(output.new_token_ids):
            if self.is_stopped:
                break
            self.token_times.append(now)
            self.logprobs += output.new_logprobs[place : place + 1]
            if self._detokenizer is not None:
                self._detokenizer.append(token_id, self._may_stop(len(self.token_ids)))
            self.token_ids.append(token_id)
        if self.is_stopped:
            self.finish("stop")
        elif output.finish_reason is not None:
            self.finish(output.finish_reason)

    def finish(self, reason: str) -> None:
        """No more tokens will come."""
        if self._detokenizer is not None:
            self._detokenizer.flush()
        self.finish_reason = reason

    def missing(self) -> EngineCoreOutput:
        """What the core knows and was not taken in, after an interruption anywhere."""
        num_taken, request = len(self.token_ids), self.request
        del self.token_times[num_taken:], self.logprobs[num_taken:]
        if self._detokenizer is not None and not self._detokenizer.has_taken(num_taken):
            self._detokenizer = self._detokenizer.fresh_copy()
            for place, token_id in enumerate(self.token_ids):
                self._detokenizer.append(token_id, self._may_stop(place))
        if self.is_stopped:  # what the core has beyond is not wanted
            return EngineCoreOutput(request.request_id, finish_reason=request.finish_reason)
        return EngineCoreOutput(
            request.request_id,
            request.output_token_ids[num_taken:],
            request.logprobs[num_taken:],
            request.finish_reason,
        )

    def snapshot(self) -> CompletionOutput:
        """The completion as it is now."""
        has_logprobs = self.request.sampling_params.logprobs is not None
        return CompletionOutput(
            self.request.index,
            self.token_ids,
            self.logprobs if has_logprobs else None,
            self.finish_reason,
            self._text_reader(),
        )

    def _text_reader(self) -> Callable[[], str]:
        detokenizer, tokenizer, num_tokens = self._detokenizer, self._tokenizer, len(self.token_ids)
        if detokenizer is not None:
            num_shown = detokenizer.num_shown
            return lambda: detokenizer.text[:num_shown]
        if tokenizer is not None:
            return lambda: decode_whole(tokenizer, self.token_ids[:num_tokens])
        return str

    def _may_stop(self, num_tokens_before: int) -> bool:
        return num_tokens_before >= self.request.sampling_params.min_tokens


class RequestState:
    """What is known of a request: its completions, its times, and who reads its outputs.

    Args:
        requests: the core's, one for each completion.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        queue: OutputQueue,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.request = requests[0]
        self.queue = queue
        makes_text = queue.wants_all or bool(self.request.sampling_params.stop)
        self.completions = [CompletionState(each, tokenizer, makes_text) for each in requests]
        times = self.completions[0].token_times
        self.metrics = RequestMetrics(time.perf_counter(), token_times=times)
        self._tokenizer = tokenizer

    @property
    def is_done(self) -> bool:
        """Whether all completions are finished."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def snapshot(self) -> RequestOutput:
        """The request as it is now."""
        request, metrics = self.request, self.metrics
        metrics.first_scheduled_time = request.first_scheduled_time
        metrics.num_preemptions = request.num_preemptions
        metrics.num_cached_tokens = request.num_cached_tokens
        is_asked = request.sampling_params.prompt_logprobs is not None
        return RequestOutput(
            request.request_id,
            request.prompt_token_ids,
            [completion.snapshot() for completion in self.completions],
            metrics,
            request.prompt_logprobs if is_asked else None,
            self.read_prompt,
        )

    @functools.cached_property
    def prompt(self) -> str | None:
        """The prompt's text, made when it is first asked for."""
        tokenizer = self._tokenizer
        return None if tokenizer is None else str(tokenizer.decode(self.request.prompt_token_ids))

    def read_prompt(self) -> str | None:
        """`prompt`, for snapshots."""
        return self.prompt


class OutputProcessor:
    """Keeps the states of all requests that are not done.

    Args:
        on_end: told of each completion that has ended, with its id and the reason, once.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        on_end: Callable[[str, str], object] = lambda request_id, reason: None,
    ) -> None:
        self.tokenizer = tokenizer
        self.states: dict[str, RequestState] = {}
        """By the request's id. A request is the engine's from the moment in which it is here."""
        self._on_end = on_end
        self._completions: dict[str, tuple[RequestState, CompletionState]] = {}

    def add(self, requests: Sequence[Request], queue: OutputQueue) -> None:
        """Follow the completions of a prompt; their outputs go to `queue`."""
        state = RequestState(requests, queue, self.tokenizer)
        for completion in state.completions:
            self._completions[completion.request.request_id] = (state, completion)
        queue.unfinished.add(state.request.request_id)
        self.states[state.request.request_id] = state

    def is_known(self, request_id: str) -> bool:
        """Whether an id belongs to a request, or completion, that is not done."""
        return request_id in self._completions

    def process(self, outputs: Iterable[EngineCoreOutput]) -> list[Request]:
        """Bring the requests up to date with what the core gave; outputs go to their queues.

        Returns:
            Those whose text has come to a stop string, each once. The core does not know of it.
        """
        now, stopped, changed = time.perf_counter(), dict[str, Request](), dict[str, RequestState]()
        for output in outputs:
            state, completion = self._completions.get(output.request_id, (None, None))
            if state is None or completion is None:  # it has ended meanwhile
                continue
            if completion.finish_reason is None:
                completion.take(output, now)
                if completion.finish_reason is not None:
                    self._on_end(output.request_id, completion.finish_reason)
            if state.queue.wants_all or completion.finish_reason is not None:
                changed[state.request.request_id] = state
            if completion.finish_reason == "stop" and not completion.request.is_finished:
                stopped[output.request_id] = completion.request
        for state in changed.values():
            self._pass_on(state)
        return list(stopped.values())

    def abort(self, state: RequestState) -> RequestOutput:
        """The core has ended all completions of a request that were not done."""
        for completion in state.completions:
            if completion.finish_reason is None:
                completion.finish("abort")
                self._on_end(completion.request.request_id, "abort")
        self._pass_on(state)
        return state.snapshot()

    def catch_up(self) -> list[Request]:
        """After an interruption anywhere: process what was not, and nothing twice.

        Returns:
            As `process`.
        """
        self._completions = {
            completion.request.request_id: (state, completion)
            for state in self.states.values()
            for completion in state.completions
        }
        outputs = []
        for _, completion in self._completions.values():
            output = completion.missing()
            is_over = output.finish_reason or completion.finish_reason or completion.is_stopped
            if output.new_token_ids or is_over:
                outputs.append(output)
        return self.process(outputs)

    def _pass_on(self, state: RequestState) -> None:
        is_done = state.is_done
        if is_done:
            state.metrics.finish_time = time.perf_counter()
        if state.queue.wants_all:
            state.queue.put(state.snapshot())
        if is_done:
            self._forget(state)

    def _forget(self, state: RequestState) -> None:
        for completion in state.completions:
            self._completions.pop(completion.request.request_id, None)
        state.queue.unfinished.discard(state.request.request_id)
        self.states.pop(state.request.request_id, None)  # from here on it is no more
