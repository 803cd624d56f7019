"""Sends what a step has brought: one message for all requests together.

It is the sink of the engine's driver where `OutputProcessor` is that of `generate`: tokens leave as
they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from milestone_llm.core.outputs import EngineCoreOutput

from .client import Deliver, EngineCoreOutputs, EngineRequest, Refusal, StepFigures


@dataclass(slots=True)
class SentTokens:
    """How far a completion has been sent."""

    request_id: str
    """Of its request."""
    num_tokens: int = 0
    is_muted: bool = False
    """Whether who asked for it has ended it, and is told no more."""


class Sender:
    """The completions that HTTP has asked for, and the way of their tokens there."""

    def __init__(self) -> None:
        self.deliver: Deliver = lambda message: None
        self.took_at = 0.0
        """When the newest step had brought its tokens, in seconds of `time.perf_counter()`."""
        self._steps: list[StepFigures] = []
        """That the next message tells of."""
        self._completions: dict[str, SentTokens] = {}

    def add(self, new: EngineRequest) -> None:
        """Follow the completions of a prompt."""
        self._completions |= {name: SentTokens(new.request_id) for name in new.completion_ids}

    def refuse(self, new: EngineRequest, refusal: Refusal) -> None:
        """Say why nothing will come of a request."""
        self.deliver(EngineCoreOutputs(refusals={new.request_id: refusal}))

    def request_ids(self) -> list[str]:
        """Of all unfinished requests."""
        return list(dict.fromkeys(each.request_id for each in self._completions.values()))

    def completion_ids(self, request_id: str) -> list[str]:
        """Of those of a request that are unfinished."""
        return [name for name, each in self._completions.items() if each.request_id == request_id]

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
                del self._completions[output.request_id]
        if message.is_of_steps:
            self._send(message)
        self.took_at = now
        return ended

    def repair(self) -> dict[str, int]:
        """After an exception anywhere: how many tokens of each completion have been sent, by id."""
        going_on = {name: each for name, each in self._completions.items() if not each.is_muted}
        self._completions = going_on  # the others were being ended
        return {name: each.num_tokens for name, each in going_on.items()}
