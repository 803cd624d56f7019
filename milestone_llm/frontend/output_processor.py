"""From tokens to outputs for callers: text, stop strings, `RequestOutput`s, times.

The core hands out token ids. The state of a request that a caller sees is kept here, and updated
with those ids, in the engine's process or in HTTP's. `process` reports a completion that a stop
string has ended, so that the core can be told.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from milestone_llm.core.outputs import EngineCoreOutput, Logprob, RequestFacts
from milestone_llm.core.sampling_params import SamplingParams

from .detokenizer import Detokenizer, decode_whole, known_tokens
from .outputs import CompletionOutput, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class CompletionState:
    """The state of one completion. `token_ids` is the truth; the rest follows from it.

    Args:
        makes_text: whether text is made token by token; if not, all at once when it is asked for.
    """

    def __init__(
        self,
        completion_id: str,
        index: int,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        makes_text: bool,
    ) -> None:
        self.completion_id = completion_id
        self.index = index
        self.params = params
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and makes_text:
            self._detokenizer = Detokenizer(
                tokenizer,
                params.stop,
                params.skip_special_tokens,
                params.include_stop_str_in_output,
            )

    @property
    def is_stopped(self) -> bool:
        """Whether the text has come to a stop string."""
        return self._detokenizer is not None and self._detokenizer.is_stopped

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string, or the id of `stop_token_ids`, that has ended the completion."""
        if self._detokenizer is not None and self._detokenizer.is_stopped:
            return self._detokenizer.found_stop
        if self.finish_reason == "stop" and self.token_ids[-1] in self.params.stop_token_ids:
            return self.token_ids[-1]
        return None

    def take(self, output: EngineCoreOutput, now: float) -> None:
        """Take in new tokens, up to the one that completes a stop string. One that ends the output
        itself (EOS, a stop token) is no part of the text, as in vLLM."""
        hides_last = self._hides_last(output.finish_reason)
        last = len(output.new_token_ids) - 1
        for place, token_id in enumerate(output.new_token_ids):
            if self.is_stopped:
                break
            self.token_times.append(now)
            self.logprobs += output.new_logprobs[place : place + 1]
            if self._detokenizer is not None and not (hides_last and place == last):
                self._detokenizer.append(token_id, self._may_stop(len(self.token_ids)))
            self.token_ids.append(token_id)
        if self.is_stopped:
            self.finish("stop")
        elif output.finish_reason is not None:
            self.finish(output.finish_reason)

    def finish(self, reason: str) -> None:
        """End the completion: no more tokens will come."""
        if self._detokenizer is not None:
            self._detokenizer.flush()
        self.finish_reason = reason

    def fail(self) -> None:
        """End the completion where a tokenizer has raised. The tokens before have been taken in."""
        log.exception("Completion %s ends: no text can be made of it", self.completion_id)
        self._drop_half_taken()
        self.finish("error")

    def repair(self) -> None:
        """Make the rest agree with `token_ids`, after an interruption anywhere."""
        self._drop_half_taken()
        num_taken, detokenizer = len(self.token_ids), self._detokenizer
        if detokenizer is None or detokenizer.has_taken(num_taken):
            return
        if detokenizer.has_taken(num_taken - 1):  # the last token is no part of the text
            return
        detokenizer = detokenizer.fresh_copy()
        for place, token_id in enumerate(self.token_ids):
            detokenizer.append(token_id, self._may_stop(place))
        self._detokenizer = detokenizer

    def _drop_half_taken(self) -> None:
        num_taken = len(self.token_ids)
        del self.token_times[num_taken:], self.logprobs[num_taken:]

    def snapshot(self) -> CompletionOutput:
        """Return the completion as it is now."""
        return CompletionOutput(
            self.index,
            self.token_ids,
            None if self.params.logprobs is None else self.logprobs,
            self.finish_reason,
            self._text_reader(),
            self.stop_reason,
        )

    def _text_reader(self) -> Callable[[], str]:
        detokenizer, tokenizer, num_tokens = self._detokenizer, self._tokenizer, len(self.token_ids)
        if detokenizer is not None:
            num_shown = detokenizer.num_shown
            return lambda: detokenizer.text[:num_shown]
        if tokenizer is not None:
            skips = self.params.skip_special_tokens
            num_tokens -= self._hides_last(self.finish_reason)
            return lambda: decode_whole(tokenizer, self.token_ids[:num_tokens], skips)
        return str

    def _hides_last(self, finish_reason: str | None) -> bool:
        """Whether the last token has ended the output, and the text does not show it."""
        return finish_reason == "stop" and not self.params.include_stop_str_in_output

    def _may_stop(self, num_tokens_before: int) -> bool:
        return num_tokens_before >= self.params.min_tokens


class RequestState:
    """The state of a request: its completions, its times, and the queue of its outputs.

    Args:
        completion_ids: the first is the request's own.
    """

    def __init__(
        self,
        completion_ids: Sequence[str],
        prompt_token_ids: list[int],
        params: SamplingParams,
        queue: OutputQueue,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.request_id = completion_ids[0]
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.queue = queue
        makes_text = queue.wants_all or bool(params.stop)
        self.completions = [
            CompletionState(completion_id, index, params, tokenizer, makes_text)
            for index, completion_id in enumerate(completion_ids)
        ]
        times = self.completions[0].token_times
        self.metrics = RequestMetrics(time.perf_counter(), token_times=times)
        self._tokenizer = tokenizer

    @property
    def is_done(self) -> bool:
        """Whether all completions are finished."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def note(self, facts: RequestFacts) -> None:
        """Take in the core's figures of the first completion."""
        self.metrics.first_scheduled_time = facts.first_scheduled_time
        self.metrics.num_preemptions = facts.num_preemptions
        self.metrics.num_cached_tokens = facts.num_cached_tokens
        if facts.prompt_logprobs is not None:
            self.prompt_logprobs = facts.prompt_logprobs

    def snapshot(self) -> RequestOutput:
        """Return the request as it is now."""
        return RequestOutput(
            self.request_id,
            self.prompt_token_ids,
            [completion.snapshot() for completion in self.completions],
            self.metrics.snapshot(),
            self.prompt_logprobs,
            self.read_prompt,
        )

    @functools.cached_property
    def prompt(self) -> str | None:
        """The prompt's text, made when it is first asked for."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return str(tokenizer.decode(known_tokens(tokenizer, self.prompt_token_ids)))

    def read_prompt(self) -> str | None:
        """Return `prompt`, for snapshots."""
        return self.prompt


class OutputProcessor:
    """Keeps the states of all requests that are not done."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.states: dict[str, RequestState] = {}
        """States by request id. A request is accepted from the moment in which it is here."""
        self.num_tokens = 0
        """Tokens taken in so far, of all requests together."""
        self._completions: dict[str, tuple[RequestState, CompletionState]] = {}

    def add(
        self,
        completion_ids: Sequence[str],
        prompt_token_ids: list[int],
        params: SamplingParams,
        queue: OutputQueue,
    ) -> RequestState:
        """Keep a state for the completions of a prompt; their outputs go to `queue`."""
        state = RequestState(completion_ids, prompt_token_ids, params, queue, self.tokenizer)
        for completion in state.completions:
            self._completions[completion.completion_id] = (state, completion)
        queue.unfinished.add(state.request_id)
        self.states[state.request_id] = state
        return state

    def is_known(self, request_id: str) -> bool:
        """Whether an id belongs to a request, or completion, that is not done."""
        return request_id in self._completions

    def process(self, outputs: Iterable[EngineCoreOutput]) -> dict[str, str]:
        """Update the requests with the core's outputs, and put their own outputs into their queues.

        Returns:
            The finish reason of completions that have ended, by id, also of those that had ended
            before. The core does not know of ends by a stop string.
        """
        if not self._completions:  # all outputs are of requests that are not known here
            return {}
        now, ended, changed = time.perf_counter(), dict[str, str](), dict[str, RequestState]()
        for output in outputs:
            state, completion = self._completions.get(output.request_id, (None, None))
            if state is None or completion is None:  # it has ended meanwhile
                continue
            if output.facts is not None:  # it is the first of the completions
                state.note(output.facts)
            if completion.finish_reason is None:
                num_before = len(completion.token_ids)
                try:
                    completion.take(output, now)
                except Exception:  # it concerns this completion and no other
                    completion.fail()
                self.num_tokens += len(completion.token_ids) - num_before
            if completion.finish_reason is not None:
                ended[output.request_id] = completion.finish_reason
                changed[state.request_id] = state
            elif state.queue.wants_all and output.new_token_ids:
                changed[state.request_id] = state
        for state in changed.values():
            self._pass_on(state)
        return ended

    def repair(self) -> dict[str, int]:
        """Repair the states of completions after an interruption anywhere.

        Returns:
            How many tokens of each completion have been taken in, by id.
        """
        self._completions = {
            completion.completion_id: (state, completion)
            for state in self.states.values()
            for completion in state.completions
        }
        for _, completion in self._completions.values():
            if completion.finish_reason is None:
                try:
                    completion.repair()
                except Exception:
                    completion.fail()
        return {
            name: len(completion.token_ids) for name, (_, completion) in self._completions.items()
        }

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
            self._completions.pop(completion.completion_id, None)
        state.queue.unfinished.discard(state.request_id)
        self.states.pop(state.request_id, None)  # from here on the request is unknown


class OutputQueue:
    """The outputs of one reader: a call of `generate` or `stream`, or all who call `step`.

    Threads may put and take at once: each line that changes the queue is one operation on one dict
    or set.

    Args:
        wants_all: whether outputs are wanted as they grow (`stream`, `step`). If not, the reader
            only asks which requests are done (`generate`).
    """

    def __init__(self, wants_all: bool = True) -> None:
        self.wants_all = wants_all
        self.unfinished: set[str] = set()
        """Ids of the reader's requests that are not done."""
        self._outputs: dict[str, RequestOutput] = {}

    def put(self, output: RequestOutput) -> None:
        """Keep an output until it is taken. It replaces an older output of the same request."""
        if self.wants_all:
            self._outputs[output.request_id] = output

    def take(self) -> list[RequestOutput]:
        """Return the outputs that the reader has not had yet."""
        taken: list[RequestOutput | None] = []
        try:
            # In one call: wherever Ctrl-C comes, an output is in the dict or in the list.
            taken.extend(map(self._outputs.pop, list(self._outputs), repeat(None)))
            return [output for output in taken if output is not None]  # else another thread has it
        except BaseException:
            for output in filter(None, taken):
                self._outputs.setdefault(output.request_id, output)  # a newer one may be there
            raise

    def discard(self, request_id: str) -> None:
        """Forget a request's output, if one is here."""
        self._outputs.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)
