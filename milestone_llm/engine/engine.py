"""The engine: requests in, `step()` by `step()`, outputs out. Written once, for all milestones.

A milestone says which scheduler plans its steps and which runner carries them out; `loop` does the
rest. Outputs of a request go to the caller that added it: a call of `generate` or `stream`, or
`step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from milestone_llm.models.checkpoint import (
    DEFAULT_MODEL,
    LoadedModel,
    load_model,
    max_position,
    stop_token_ids,
)
from milestone_llm.models.kv_shape import kv_bytes_per_token

from .config import EngineConfig
from .inputs import Prompt, Prompts
from .intake import Intake
from .loop import StepLoop
from .outbox import Reader
from .outputs import RequestOutput
from .protocols import ModelRunner, StepWatcher
from .request import Request
from .sampling_params import SamplingParams
from .scheduler import BaseScheduler
from .stats import engine_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    warm_up_sizes: ClassVar[Sequence[int]] = (1,)
    """How many requests `warm_up` computes at one time."""

    def __init__(
        self,
        model: str | PreTrainedModel = DEFAULT_MODEL,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        **fields: object,
    ) -> None:
        self.config = self.config_class.from_fields(**fields)
        loaded = self.load(model, tokenizer)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.model_name = loaded.name
        self.check_model(self.model)
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.eos_token_ids = stop_token_ids(self.model)
        self.max_model_len = self.config.resolve_max_model_len(max_position(self.model))
        tracer = self.open_trace(self.config.trace, self.tokenizer and self.tokenizer.decode)
        self.scheduler = self.build_scheduler()
        self._loop = StepLoop(
            self.milestone,
            self.scheduler,
            self.build_runner(),
            tracer,
            lambda: self.num_steps_ahead,
            self.config.check_invariants,
        )
        self._intake = Intake(
            self.tokenizer,
            self.vocab_size,
            self.max_model_len,
            self.eos_token_ids,
            self.config.seed,
            self._loop.is_taken,
            self.scheduler.validate,
        )

    @property
    def runner(self) -> ModelRunner:
        """What carries the plans out."""
        return self._loop.runner

    @runner.setter
    def runner(self, runner: ModelRunner) -> None:
        self._loop.runner = runner

    @property
    def tracer(self) -> StepWatcher | None:
        """What watches the steps."""
        return self._loop.tracer

    @tracer.setter
    def tracer(self, tracer: StepWatcher | None) -> None:
        self._loop.tracer = tracer

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests by id, without further completions."""
        return self._loop.requests

    def load(
        self,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | str | None,
    ) -> LoadedModel:
        """The model with its weights, as `load_model` gives it."""
        return load_model(model, tokenizer, dtype=self.config.dtype, device=self.config.device)

    @staticmethod
    @abstractmethod
    def check_model(model: PreTrainedModel) -> None:
        """Raise ValueError for a model that this milestone would not run right."""

    @staticmethod
    @abstractmethod
    def open_trace(
        option: str | None, decode: Callable[[list[int]], str] | None
    ) -> StepWatcher | None:
        """What watches the steps, made of `EngineConfig.trace`; `decode` is the tokenizer's."""

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
        with self._intake.lock:
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

        Closing the iterator early aborts the unfinished requests.
        """
        with self._intake.lock:
            requests = self._intake.make_all(prompts, sampling_params, chat)
        outputs = self._run(requests, Reader(wants_all=True))
        next(outputs)  # a generator that was never entered would not abort on `close`
        return cast(Iterator[RequestOutput], outputs)

    def _run(self, requests: list[Request], reader: Reader) -> Iterator[RequestOutput | None]:
        """Step until these requests are done, and yield their outputs.

        The first thing yielded is None, before any step.
        """
        try:
            self._enqueue(requests, reader)
            yield None
            while reader.num_unfinished:
                self._loop.step()
                yield from self._loop.outbox.take(reader)
            yield from self._loop.outbox.take(reader)  # of a step that another caller made
        finally:  # Ctrl-C, an error, a closed iterator: leave nothing behind
            for request in requests:
                if not request.is_done and self.requests.get(request.request_id) is request:
                    self.abort(request.request_id)
            reader.wants_all = False  # a step under way may have more for it
            self._loop.outbox.take(reader)

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
        with self._intake.lock:
            request = self._intake.make(prompt, params, request_id, priority, chat)
        self._enqueue([request], None)
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
        if self.requests or self._loop.in_flight:
            self._loop.step()
        return self._loop.outbox.take(None)

    def take_outputs(self) -> list[RequestOutput]:
        """What the next `step` would return besides its own: after one that raised, its errors."""
        return self._loop.outbox.take(None)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; None if it is not (or no longer) known."""
        return self._loop.abort(request_id)

    def _enqueue(self, requests: list[Request], reader: Reader | None) -> None:
        self._loop.add(requests, reader)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give: requests to compute, or outputs kept for it."""
        return bool(self.requests or self._loop.outbox.has(None))

    @property
    def counts(self) -> dict[str, int]:
        """Counts of steps, rows and tokens since the engine was built: `stats` without a search."""
        return self._loop.counts

    def warm_up(self) -> None:
        """Do the work that a first request would have to wait for. Counts and seeds do not notice.

        Raises:
            RuntimeError: there are requests already.
        """
        if self.requests:
            raise RuntimeError(f"warm_up is for the start; there are {len(self.requests)} requests")
        counts, tracer = dict(self.counts), self.tracer
        num_arrivals = self._intake.num_arrivals
        self.tracer = None
        try:
            prompt = [0] * min(2, self.max_model_len - 1)
            # With prompt_logprobs it asks nothing of a prefix cache, which counts its queries.
            params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
            for size in self.warm_up_sizes:
                self.generate([prompt] * min(size, self.config.max_num_seqs), params)
        finally:
            self.tracer = tracer
            self.counts.update(counts)
            self._intake.num_arrivals = num_arrivals  # seeds depend on it

    def stats(self) -> dict[str, Any]:
        """Counts since the engine was built, and the state of queues and KV memory now."""
        return engine_stats(self._loop.counts, self.scheduler, kv_bytes_per_token(self.model))
