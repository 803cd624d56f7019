"""The engine that people call: prompts in, `step()` by `step()`, outputs out. For all milestones.

    prompt -> InputProcessor -> Request -> EngineCore -> tokens -> OutputProcessor -> OutputQueue

A milestone assembles a scheduler and a runner; the rest is here. Outputs of a request go to the
caller that added it: a call of `generate` or `stream`, or `step`.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from milestone_llm.core.engine_core import ModelRunner
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.models.checkpoint import LoadedModel, stop_token_ids
from milestone_llm.models.kv_shape import kv_bytes_per_token

from .config import EngineConfig
from .exclusive import Exclusive
from .garbage import no_full_collection
from .guarded_core import GuardedCore
from .input_processor import InputProcessor
from .inputs import Prompt, Prompts, check_request_id
from .output_processor import OutputProcessor, RequestState
from .output_queue import OutputQueue
from .outputs import RequestOutput
from .stats import engine_stats
from .warm_up import compute_unnoticed
from .watching import StepWatcher


class BaseEngine:
    """Serves requests on a core.

    One thread steps at a time; `add_request`, `abort` and `step` may be called from any thread, and
    wait until the step under way is done.

    Args:
        config: limits and switches.
        loaded: the model, its tokenizer and its name.
        max_model_len: most tokens of a request, as the scheduler has it.
        core: what the milestone has assembled.
        aging_seconds: waiting so long makes a request more urgent by 1, where the scheduler orders
            by priority; None: it does not.
        block_size: tokens of a KV block, where KV memory has blocks.
    """

    milestone: ClassVar[str]
    warm_up_sizes: ClassVar[Sequence[int]] = (1,)
    """How many requests `warm_up` computes at one time."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        max_model_len: int,
        core: GuardedCore,
        *,
        aging_seconds: float | None = None,
        block_size: int | None = None,
    ) -> None:
        self.config = config
        self.model, self.tokenizer, self.model_name = loaded.model, loaded.tokenizer, loaded.name
        self.max_model_len = max_model_len
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.eos_token_ids = stop_token_ids(self.model)
        # No part knows the engine: its memory is free when nobody has it any more.
        self.core = core
        self.output_processor = processor = OutputProcessor(self.tokenizer, core.note_end)
        self._step_queue = queue = OutputQueue()
        """Outputs of requests that `add_request` brought."""
        self.input_processor = InputProcessor(
            self.tokenizer,
            self.vocab_size,
            max_model_len,
            self.eos_token_ids,
            config.seed,
            lambda request_id: processor.is_known(request_id) or request_id in queue,
            core.scheduler.validate,
            aging_seconds,
        )
        self._block_size = block_size
        self._readers: list[OutputQueue] = []
        """Those of calls of `generate` and `stream` that are under way."""
        self._intake = Exclusive()
        self._exclusive = Exclusive(partial(_restart, core, processor))

    @property
    def scheduler(self) -> BaseScheduler:
        """What plans the steps."""
        return self.core.scheduler

    @property
    def runner(self) -> ModelRunner:
        """What carries the plans out."""
        return self.core.runner

    @property
    def tracer(self) -> StepWatcher | None:
        """The first of those who watch the steps."""
        return self.core.watchers[0] if self.core.watchers else None

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests by id, without further completions."""
        return {name: state.request for name, state in self.output_processor.states.items()}

    # -- offline use -------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts and return when all are done.

        Args:
            prompts: one prompt or several; each text, token ids or chat messages.
            sampling_params: one for all prompts, or one each.
            chat: take a text prompt as a user's message and apply the model's chat template.

        Returns:
            One output a prompt, in the order given.

        Raises:
            InputError: bad input; nothing has been queued then.
        """
        states: list[RequestState] = []
        queue = OutputQueue(wants_all=False)
        with no_full_collection():
            for _ in self._start(prompts, sampling_params, chat, queue, states):
                pass
        return [state.snapshot() for state in states]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output whenever it has grown.

        Closing the iterator early aborts the unfinished requests. The last output of a request that
        is aborted meanwhile goes to who called `abort`.
        """
        return self._start(prompts, sampling_params, chat, OutputQueue(), [])

    def _start(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        chat: bool,
        queue: OutputQueue,
        states: list[RequestState],
    ) -> Iterator[RequestOutput]:
        """Queue requests, and return what steps until they are done and yields their outputs.

        Args:
            states: theirs are appended here.
        """
        make_all = partial(self.input_processor.make_all, prompts, sampling_params, chat)
        outputs = self._run(self._intake.run(make_all), queue, states)
        queue.reader = weakref.ref(outputs)
        next(outputs)  # a generator that was never entered has nothing to close
        return cast(Iterator[RequestOutput], outputs)

    def _run(
        self, prompts: list[list[Request]], queue: OutputQueue, states: list[RequestState]
    ) -> Generator[RequestOutput | None, None, None]:
        try:
            states += self._exclusive.run(partial(self._add, prompts, queue))
            yield None
            while queue.unfinished:
                self._exclusive.run(self._step)
                yield from queue.take()
            yield from queue.take()  # of a step that another caller made
        finally:  # Ctrl-C, an error, a closed iterator: leave nothing behind
            queue.is_closed = True
            if not self._exclusive.is_inside():  # thrown away in mid-step, the next one sees to it
                self._exclusive.run(self._drop_unread)

    # -- online use --------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        chat: bool = False,
    ) -> str:
        """Queue one request; `step` will compute it. Returns its id.

        Args:
            priority: lower is sooner, for schedulers with `policy="priority"` (from M2 on). With
                `aging_seconds` it counts less the longer the request has waited.

        Raises:
            InputError: bad input; no other request is affected.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        make = partial(self.input_processor.make, prompt, params, request_id, priority, chat)
        requests = self._intake.run(make)
        self._exclusive.run(partial(self._add, [requests], self._step_queue))
        return requests[0].request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            Outputs of the requests that changed, finished ones for the last time. Those that a call
            of `generate` or `stream` waits for are not among them.

        Raises:
            Exception: what the model's forward raised. The step's requests have then ended with
                `error` (their outputs come with the next step); the others go on.
        """
        if self.output_processor.states or self.core.in_flight:
            self._exclusive.run(self._step)
        return self._step_queue.take()

    def take_outputs(self) -> list[RequestOutput]:
        """What the next `step` would return besides its own: after one that raised, its errors."""
        return self._step_queue.take()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; None if it is not (or no longer) known."""
        return self._exclusive.run(partial(self._abort, request_id))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give: requests to compute, or outputs kept for it."""
        return bool(self.output_processor.states or self._step_queue)

    def is_taken(self, request_id: str) -> bool:
        """Whether an id belongs to a request, or completion, that is unfinished or undelivered."""
        return self.input_processor.is_taken(request_id)

    # -- one thread at a time ----------------------------------------------------------------

    def _add(self, prompts: list[list[Request]], queue: OutputQueue) -> list[RequestState]:
        self._drop_unread()
        names = [completions[0].request_id for completions in prompts]
        for name in names:  # another thread may have been faster with the same id
            check_request_id(name, self.is_taken)
        if queue.reader is not None:
            self._readers.append(queue)
        for completions in prompts:
            self.output_processor.add(completions, queue)
            self.core.add_request(*completions)
        return [self.output_processor.states[name] for name in names]

    def _step(self) -> None:
        self._drop_unread()
        for request in self.output_processor.process(self.core.step()):
            self.core.finish_request(request, "stop")
        self.core.close_steps()

    def _abort(self, request_id: str) -> RequestOutput | None:
        state = self.output_processor.states.get(request_id)
        if state is None:
            return None
        for completion in reversed(state.completions):  # forks before what they fork from
            if not completion.request.is_finished:
                self.core.finish_request(completion.request, "abort")
        output = self.output_processor.abort(state)
        self.core.close_steps()
        state.queue.discard(request_id)  # up to here, `step` would deliver it
        return output

    def _drop_unread(self) -> None:
        """End the requests that nobody waits for any more."""
        for queue in [queue for queue in self._readers if queue.is_abandoned()]:
            for request_id in list(queue.unfinished):
                self._abort(request_id)
            self._readers.remove(queue)

    # -- before and after --------------------------------------------------------------------

    def warm_up(self) -> None:
        """Do the work that a first request would have to wait for. It changes no count and no seed.

        Raises:
            RuntimeError: there are requests already.
        """
        if num_requests := len(self.output_processor.states):
            raise RuntimeError(f"warm_up is for the start; there are {num_requests} requests")
        sizes = [min(size, self.config.max_num_seqs) for size in self.warm_up_sizes]
        compute_unnoticed(self.core, self.input_processor, self.generate, sizes, self._block_size)

    def stats(self) -> dict[str, Any]:
        """Counts since the engine was built, and the state of queues and KV memory now."""
        return engine_stats(self.core, kv_bytes_per_token(self.model))


def _restart(core: GuardedCore, output_processor: OutputProcessor) -> None:
    """After whatever was raised: go on with the requests as they are."""
    states = list(output_processor.states.values())
    core.restart([each.request for state in states for each in state.completions])
    for request in output_processor.catch_up():
        core.finish_request(request, "stop")
    core.close_steps()
