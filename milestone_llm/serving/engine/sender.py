"""Send the outputs of each step to HTTP: one message for all requests together.

The engine's driver gives its outputs to a `Sender` here, and to `OutputProcessor` in `generate`. A
`Sender` passes tokens on as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from milestone_llm.core.outputs import EngineCoreOutput

from .client import Deliver, EngineCoreOutputs, EngineRequest, Refusal, StepFigures


@dataclass(slots=True)
class SentTokens:
    """How much of a completion has been sent."""

    request_id: str
    """Id of its request."""
    num_tokens: int = 0
    is_muted: bool = False
    """Whether the client has ended it and is sent nothing more."""


class Sender:
    """The completions that HTTP has requested, and the messages with their tokens."""

    def __init__(self) -> None:
        self._deliver: Deliver = lambda message: None
        self.took_at = 0.0
        """When the newest step had returned its tokens, in seconds of `time.perf_counter()`."""
        self._steps: list[StepFigures] = []
        """Steps that the next message reports."""
        self._completions: dict[str, SentTokens] = {}

    def deliver_to(self, deliver: Deliver) -> None:
        """Send messages there from now on."""
        self._deliver = deliver

    def add(self, new: EngineRequest) -> None:
        """Track the completions of a prompt."""
        self._completions |= {name: SentTokens(new.request_id) for name in new.completion_ids}

    def refuse(self, new: EngineRequest, refusal: Refusal) -> None:
        """Send the error of a request."""
        self._deliver(EngineCoreOutputs(refusals={new.request_id: refusal}))

    def request_ids(self) -> list[str]:
        """Return the ids of all unfinished requests."""
        return list(dict.fromkeys(each.request_id for each in self._completions.values()))

    def completion_ids(self, request_id: str) -> list[str]:
        """Return the ids of a request's unfinished completions."""
        return [name for name, each in self._completions.items() if each.request_id == request_id]

    def mute(self, completion_ids: Iterable[str]) -> None:
        """Send nothing more of these completions."""
        for completion_id in completion_ids:
            if completion_id in self._completions:
                self._completions[completion_id].is_muted = True

    def note_step(self, step: StepFigures) -> None:
        """Add a step to the next message. The step's own outputs have been sent."""
        self._steps.append(step)

    def flush(self) -> None:
        """Send the steps that no message has reported."""
        if self._steps:
            self._send(EngineCoreOutputs())

    def _send(self, message: EngineCoreOutputs) -> None:
        message.steps, self._steps = self._steps, []
        self._deliver(message)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> dict[str, str]:
        """Send the outputs of the engine core.

        Returns:
            Finish reasons of the completions that have ended, by id.
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
        """Drop completions that were being ended. Called after an exception."""
        going_on = {name: each for name, each in self._completions.items() if not each.is_muted}
        self._completions = going_on
        return {name: each.num_tokens for name, each in going_on.items()}
