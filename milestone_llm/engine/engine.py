"""The engine: requests in, `step()` by `step()`, outputs out. Written once, for all milestones.

A step is planned, launched and settled:

    plan     scheduler.schedule()      who computes which tokens
    launch   runner.launch(plan)       the forward begins
    settle   runner.collect(...)       its tokens are there
             scheduler.update(...)     requests take them in, some finish

M1 to M4 settle a step at once. M5 settles it after the next one has been launched, so that the GPU
has work while Python plans: `num_steps_ahead` is 1 there, and all else is the same.

What happens when something is raised, Ctrl-C included: an exception in the forward ends the step's
requests with `error`. Whatever is raised, and wherever, all other requests keep their tokens; KV
memory is given back and computed again. So a step has happened or it has not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from milestone_llm.models.checkpoint import (
    DEFAULT_MODEL,
    load_model,
    max_position,
    stop_token_ids,
)
from milestone_llm.models.kv_shape import KVShape

from .config import EngineConfig
from .inputs import Prompt
from .intake import Intake
from .outbox import Outbox, Reader
from .outputs import RequestOutput
from .plan import LaunchedStep, StepPlan
from .protocols import ModelRunner, SettledStep, StepWatcher
from .request import Request, SampledToken
from .sampling_params import SamplingParams
from .scheduler import BaseScheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompts = Prompt | Sequence[Prompt]


@dataclass
class StepInFlight:
    """A step that was launched and whose tokens have not been taken in."""

    plan: StepPlan
    launched: LaunchedStep
    times: list[float]


class BaseEngine(ABC):
    """A language model and the loop that serves requests on it.

    One thread steps at a time; `add_request`, `abort` and `step` may be called from any thread, and
    wait until the step under way is done.

    Args:
        model: Hugging Face id or local folder, GGUF file, "smollm2-135m", "tiny-llama" (random
            weights; also other families), or a ready `PreTrainedModel`.
        tokenizer: for a ready model; without one prompts are token ids and `text` stays empty.
        fields: fields of `EngineConfig`.

    Raises:
        ValueError: an unknown field, or limits that do not go together.
    """

    milestone: ClassVar[str]
    config_class: ClassVar[type[EngineConfig]]

    def __init__(
        self,
        model: str | PreTrainedModel = DEFAULT_MODEL,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        **fields: object,
    ) -> None:
        self.config = self.config_class.from_fields(**fields)
        loaded = load_model(model, tokenizer, dtype=self.config.dtype, device=self.config.device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.model_name = loaded.name
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.eos_token_ids = stop_token_ids(self.model)
        self.max_model_len = self.config.resolve_max_model_len(max_position(self.model))
        self.tracer = self.open_trace(self.config.trace)
        self.scheduler = self.build_scheduler()
        self.runner = self.build_runner()

        self.requests: dict[str, Request] = {}
        """Unfinished ones, without further completions. The truth after an interruption."""
        self.outbox = Outbox()
        self._intake = Intake(
            self.tokenizer,
            self.vocab_size,
            self.max_model_len,
            self.eos_token_ids,
            self.config.seed,
            self._is_taken,
            self.scheduler.validate,
        )
        self._in_flight: deque[StepInFlight] = deque()
        self._lock = threading.RLock()
        self._owner: int | None = None  # the thread that changes the engine
        self._is_torn = False  # True while it changes, and after an interruption until the restart
        self._to_abort: list[str] = []
        self._ended: list[tuple[str, str]] = []  # (id, reason) since the last step, for the trace
        self._counts = dict.fromkeys(
            ("steps", "rows", "prefill_tokens", "decode_tokens", "padding_tokens", "finished"), 0
        )

    @staticmethod
    @abstractmethod
    def open_trace(option: str | None) -> StepWatcher | None:
        """What watches the steps, made of `EngineConfig.trace`."""

    @abstractmethod
    def build_scheduler(self) -> BaseScheduler:
        """The scheduler of this milestone."""

    @abstractmethod
    def build_runner(self) -> ModelRunner:
        """The model runner of this milestone."""

    @property
    def num_steps_ahead(self) -> int:
        """Launched steps that may be left to settle when `step` returns."""
        return 0

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
            ValueError: bad input; nothing has been queued then.
        """
        with self._lock:
            requests = self._intake.make_all(prompts, sampling_params, chat)
        for _ in self._run(requests, Reader(wants_all=False)):
            pass
        return [RequestOutput.from_request(request) for request in requests]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output whenever it has grown.

        Closing the iterator early aborts what is unfinished.
        """
        with self._lock:
            requests = self._intake.make_all(prompts, sampling_params, chat)
        outputs = self._run(requests, Reader(wants_all=True))
        next(outputs)  # a generator that was never entered would not abort on `close`
        return outputs  # type: ignore[return-value]

    def _run(self, requests: list[Request], reader: Reader) -> Iterator[RequestOutput | None]:
        """Step until these requests are done, and yield their outputs.

        The first thing yielded is None, before any step.
        """
        try:
            for request in requests:
                request.reader = reader
                self._enqueue(request)
            yield None
            while reader.num_unfinished:
                self._step()
                yield from self.outbox.take(reader)
            yield from self.outbox.take(reader)  # of a step that another caller made
        finally:  # Ctrl-C, an error, a closed iterator: leave nothing behind
            for request in requests:
                if not request.is_done and self.requests.get(request.request_id) is request:
                    self.abort(request.request_id)
            self.outbox.take(reader)

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
            priority: lower is sooner, for schedulers with `policy="priority"` (from M2 on).

        Raises:
            ValueError: bad input; no other request is affected.
        """
        params = sampling_params or SamplingParams()
        with self._lock:
            request = self._intake.make(prompt, params, request_id, priority, chat)
            self._enqueue(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            Outputs of the requests that changed, finished ones for the last time. Those that a call
            of `generate` or `stream` waits for are not among them.

        Raises:
            Exception: what the model's forward raised. The step's requests have then ended with
                `error` (their outputs come with the next step); the others go on.
        """
        if self.requests or self._in_flight:
            self._step()
        return self.outbox.take(None)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; None if it is not (or no longer) known."""
        if self._is_inside():  # a collected iterator of `stream`, say: not in the middle of a step
            self._to_abort.append(request_id)
            return None
        with self._changing():
            request = self.requests.get(request_id)
            if request is None:
                return None
            for completion in reversed(request.completions):  # forks before what they fork from
                if not completion.is_finished:
                    self.scheduler.abort(completion)
            self._note_ends(request)
            if not self.requests:
                self._settle_all()  # what is under way is for nobody
        return RequestOutput.from_request(request)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give: requests to compute, or outputs kept for it."""
        return bool(self.requests or self.outbox.has(None))

    def stats(self) -> dict[str, Any]:
        """Counts since the engine was built, and the state of queues and KV memory now."""
        counts = self._counts
        useful = counts["prefill_tokens"] + counts["decode_tokens"]
        computed = useful + counts["padding_tokens"]
        kv = self.scheduler.kv_usage()
        milestone = self.scheduler.stats()
        return {
            **counts,
            "useful_share": useful / computed if computed else 1.0,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            **milestone,
            "kv": {
                **asdict(kv),
                "free": kv.free,
                "bytes_per_token": KVShape.of(self.model).bytes_per_token,
                **milestone.get("kv", {}),
            },
        }

    # -- the loop ----------------------------------------------------------------------------

    def _step(self) -> None:
        """Plan and launch a step, settle those that are due. Outputs go to the outbox."""
        with self._changing():
            while len(self._in_flight) > self.num_steps_ahead:
                self._settle()  # a request has come whose tokens must be known at once
            is_launched = bool(self.requests) and self._launch()
            num_ahead = self.num_steps_ahead if is_launched else 0
            while len(self._in_flight) > num_ahead:
                self._settle()
            if not self.requests:
                self._settle_all()  # what is under way is for nobody

    def _launch(self) -> bool:
        """Plan a step and start it. False if nothing can be computed before tokens come back."""
        times = [time.perf_counter()]
        plan = self.scheduler.schedule()
        times.append(time.perf_counter())
        if plan.is_empty:
            assert self._in_flight, "the scheduler has unfinished requests but plans nothing"
            return False
        for request in plan.admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = times[-1]
        try:
            launched = self.runner.launch(plan)
        except Exception:
            with contextlib.suppress(Exception):
                self._settle_all()  # the step before is as good as ever
            self._fail(plan, times)
            raise
        self.scheduler.mark_launched(plan)
        if self.tracer is not None:  # block tables as they are now
            for row in plan.rows:
                row.blocks = list(row.blocks)
        self._in_flight.append(StepInFlight(plan, launched, times))
        return True

    def _settle(self) -> None:
        """Wait for the oldest step under way and take in its tokens."""
        step = self._in_flight.popleft()
        try:
            sampled = self.runner.collect(step.launched)
        except Exception:
            self._fail(step.plan, step.times)
            raise
        step.times.append(time.perf_counter())
        outputs = self.scheduler.update(step.plan, sampled)
        step.times.append(time.perf_counter())
        self._close_step(step.plan, step.times, sampled, outputs)

    def _settle_all(self) -> None:
        while self._in_flight:
            self._settle()

    def _fail(self, plan: StepPlan, times: list[float]) -> None:
        """End the requests of a step whose forward raised."""
        outputs = self.scheduler.fail(plan)
        times += [time.perf_counter()] * (4 - len(times))
        self._close_step(plan, times, {}, outputs)

    def _close_step(
        self,
        plan: StepPlan,
        times: list[float],
        sampled: dict[str, SampledToken],
        outputs: list[RequestOutput],
    ) -> None:
        """Deliver, count, record and check what the step did."""
        for output in outputs:
            leader = self.requests[output.request_id]
            self.outbox.put(output, leader.reader)
            self._note_ends(leader)
        num_decode_tokens = sum(row.phase == "decode" for row in plan.rows)
        counts = self._counts
        counts["steps"] += 1
        counts["rows"] += len(plan.rows)
        counts["prefill_tokens"] += plan.num_tokens - num_decode_tokens
        counts["decode_tokens"] += num_decode_tokens
        counts["padding_tokens"] += plan.num_padding_tokens
        events = self.scheduler.drain_events()
        if self.tracer is not None:
            ended, self._ended = self._ended, []
            number = counts["steps"] - 1
            self.tracer.record(
                SettledStep(number, self.milestone, times, plan, sampled, ended, events),
                self.scheduler,
            )
        if self.config.check_invariants:
            self.scheduler.check_invariants()

    # -- requests come and go ----------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        """From here on the request is the engine's."""
        with self._changing():
            self.requests[request.request_id] = request
            if request.reader is not None:
                request.reader.num_unfinished += 1
            self.scheduler.add(request)

    def _note_ends(self, leader: Request) -> None:
        """Count completions that have ended; forget a request all of whose have."""
        for completion in leader.completions:
            if completion.is_finished and not completion.is_counted:
                completion.is_counted = True
                self._counts["finished"] += 1
                if self.tracer is not None:
                    self._ended.append((completion.request_id, str(completion.finish_reason)))
        if leader.is_done:
            if leader.reader is not None:
                leader.reader.num_unfinished -= 1
            del self.requests[leader.request_id]

    def _is_taken(self, request_id: str) -> bool:
        """Whether an id belongs to a request, or completion, that is unfinished or undelivered."""
        if request_id in self.requests or self.outbox.holds(request_id):
            return True
        parent = self.requests.get(request_id.rpartition("/")[0])
        return parent is not None and any(
            completion.request_id == request_id for completion in parent.completions
        )

    # -- interruptions -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Within, one thread changes the engine. What is raised there leads to a restart."""
        if self._is_inside():
            raise RuntimeError("the engine was called from within one of its own steps")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                if self._is_torn:  # a change was interrupted, and so was its restart
                    self._restart()
                self._is_torn = True
                yield
                self._is_torn = False
            except BaseException:
                self._restart()
                raise
            finally:
                self._owner = None
        while self._to_abort:
            self.abort(self._to_abort.pop())

    def _is_inside(self) -> bool:
        return self._owner == threading.get_ident()

    def _restart(self) -> None:
        """Begin anew with the requests as they are: their tokens are kept, their KV is not."""
        self._in_flight.clear()
        completions = [each for leader in self.requests.values() for each in leader.completions]
        self.scheduler.restart(completions)
        for leader in list(self.requests.values()):
            if leader.is_done:  # it took its last token in the step that was interrupted
                self.outbox.put(RequestOutput.from_request(leader), leader.reader)
                self._note_ends(leader)
        with contextlib.suppress(Exception):  # on a broken device the first error is the one
            self.runner.reset()
        self._is_torn = False
