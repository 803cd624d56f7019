"""Sends what a step has brought: one message for all requests together.

It is the sink of the engine's driver where `OutputProcessor` is that of `generate`: tokens leave as
they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.core.request import Request

from .client import Deliver, EngineCoreOutputs, EngineRequest, Refusal, StepFigures


class SentRequest:
    """A request whose completions have not all ended.

    Args:
        new: what was asked for.
        completions: the core's.
    """

    def __init__(self, new: EngineRequest, completions: Sequence[Request]) -> None:
        self.request_id = new.request_id
        self.completions = completions
        self.num_going_on = len(completions)


class SentTokens:
    """How far a completion has been sent."""

    def __init__(self, of: SentRequest) -> None:
        self.of = of
        self.num_tokens = 0
        self.is_muted = False
        """Whether who asked for it has ended it, and is told no more."""


class Sender:
    """The requests that HTTP has asked for, and the way of their tokens there."""

    def __init__(self) -> None:
        self.deliver: Deliver = lambda message: None
        self.took_at = 0.0
        """When the newest step had brought its tokens, in seconds of `time.perf_counter()`."""
        self.num_taken = 0
        """Of how many completions."""
        self._steps: list[StepFigures] = []
        """That the next message tells of."""
        self._requests: dict[str, SentRequest] = {}
        self._completions: dict[str, SentTokens] = {}

    def add(self, new: EngineRequest, completions: Sequence[Request]) -> None:
        """Follow the completions of a prompt."""
        request = SentRequest(new, completions)
        self._requests[new.request_id] = request
        self._completions.update({each.request_id: SentTokens(request) for each in completions})

    def refuse(self, new: EngineRequest, refusal: Refusal) -> None:
        """Say why nothing will come of a request."""
        self.deliver(EngineCoreOutputs(refusals={new.request_id: refusal}))

    def request_ids(self) -> list[str]:
        """Of all unfinished requests."""
        return list(self._requests)

    def completion_ids(self, request_id: str) -> list[str]:
        """Of a request, if it is unfinished."""
        request = self._requests.get(request_id)
        return [] if request is None else [each.request_id for each in request.completions]

    def mute(self, completion_ids: Iterable[str]) -> None:
        """Send no more of completions."""
        for completion_id in completion_ids:
            if completion_id in self._completions:
                self._completions[completion_id].is_muted = True

    def note_step(self, step: StepFigures) -> None:
        """A step has ended, and what it brought is sent."""
        self._steps.append(step)

    def flush(self) -> None:
        """Send what is known of steps now."""
        if self._steps:
            self._send(EngineCoreOutputs())

    def _send(self, message: EngineCoreOutputs) -> None:
        message.steps, self._steps = self._steps, []
        self.deliver(message)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> dict[str, str]:
        """Send what the core has brought.

        Returns:
            Why completions have ended, by id.
        """
        now = time.perf_counter()
        message = EngineCoreOutputs(now)
        ended: dict[str, str] = {}
        for output in outputs:
            completion = self._completions.get(output.request_id)
            num_new = len(output.new_token_ids)
            if completion is None or not (num_new or output.finish_reason):
                continue
            if not completion.is_muted:
                message.add(output)
            completion.num_tokens += num_new
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
                self._note_end(output.request_id)
        if message.is_of_steps:
            self._send(message)
        self.took_at, self.num_taken = now, len(outputs)
        return ended

    def repair(self) -> dict[str, int]:
        """After an exception anywhere: how many tokens of each completion have been sent, by id."""
        for completion_id in [name for name, each in self._completions.items() if each.is_muted]:
            self._note_end(completion_id)  # it was being ended
        return {name: each.num_tokens for name, each in self._completions.items()}

    def _note_end(self, completion_id: str) -> None:
        """A completion has ended; with the last one, so has its request."""
        request = self._completions.pop(completion_id).of
        request.num_going_on -= 1
        if not request.num_going_on:
            del self._requests[request.request_id]
