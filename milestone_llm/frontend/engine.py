"""The engine that people call: prompts in, `step()` by `step()`, outputs out. For all milestones.

    prompt -> InputProcessor -> Request -> EngineCore -> tokens -> OutputProcessor -> OutputQueue

A milestone brings a scheduler and a runner; the parts around them are assembled here, for all
milestones. Outputs of a request go to the caller that added it: a call of `generate` or `stream`,
`step`, or HTTP (`milestone_llm.serving.engine.loop`), which uses the same driver.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from milestone_llm.core.engine_core import EngineCore, ModelRunner
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.core.unknown_names import refuse_unknown
from milestone_llm.gc_control import gc_young_only
from milestone_llm.models.checkpoint import LoadedModel, stop_token_ids
from milestone_llm.models.kv_shape import kv_bytes_per_token
from milestone_llm.structured.grammars import Grammars

from .config import EngineConfig
from .engine_driver import EngineDriver, Peers, StepMaker
from .html_table import flat, html_table
from .input_processor import EncodedPrompt, InputProcessor
from .inputs import Prompt, Prompts, check_is_id, check_priority
from .output_processor import OutputProcessor, OutputQueue, RequestState
from .outputs import RequestOutput
from .progress import progress_bar
from .step_log import StepLog, StepWatcher
from .vllm_names import ENGINE_INSTEAD, METHODS_INSTEAD, refuse_arguments
from .warm_up import warm_up


class BaseEngine:
    """Serves requests on a core.

    One thread steps at a time; `add_request`, `abort` and `step` may be called from any thread, and
    wait until the step under way is done.

    Args:
        config: limits and switches.
        loaded: the model, its tokenizer and its name.
        max_model_len: most tokens of a request, as the scheduler has it.
        scheduler: plans the steps.
        runner: carries the plans out.
        tracer: the first of the watchers that get every step.
        pipeline: makes the steps of a core in another way than `EngineCore.step`.
        grammars: grammars of structured outputs; None: made here.
        peers: the same engine in other processes, if there are any.
        aging_seconds: waiting this long makes a request more urgent by 1, where the scheduler
            orders by priority; None: waiting does not count.
        block_size: tokens in a KV block, where KV memory has blocks.
    """

    milestone: ClassVar[str]
    config: EngineConfig
    scheduler: BaseScheduler
    decoder_name = "Hugging Face's modules"
    """Who computes, in words."""
    warm_up_sizes: ClassVar[Sequence[int]] = (1,)
    """How many requests `warm_up` computes at one time."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        max_model_len: int,
        scheduler: BaseScheduler,
        runner: ModelRunner,
        tracer: StepWatcher | None,
        *,
        pipeline: Callable[[EngineCore], StepMaker] | None = None,
        grammars: Grammars | None = None,
        peers: Peers | None = None,
        aging_seconds: float | None = None,
        block_size: int | None = None,
    ) -> None:
        if isinstance(runner, str):  # vLLM's "generate", "pooling"
            refuse_unknown(["runner"], (), ENGINE_INSTEAD, type(self).__module__)
        self.config = config
        self.model, self.tokenizer, self.model_name = loaded.model, loaded.tokenizer, loaded.name
        self.max_model_len = max_model_len
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.eos_token_ids = stop_token_ids(self.model)
        # No part refers to the engine: its memory is freed as soon as the user drops the engine.
        self.scheduler, self.runner = scheduler, runner
        self.step_log = log = StepLog(self.milestone, scheduler, tracer, config.check_invariants)
        self.driver = EngineDriver(scheduler, runner, log, pipeline=pipeline, peers=peers)
        self.core = self.driver.core
        self.output_processor = processor = OutputProcessor(self.tokenizer)
        self.driver.attach(processor)
        self._step_queue = queue = OutputQueue()
        """Outputs of requests that `add_request` brought."""
        self.input_processor = InputProcessor(
            self.tokenizer,
            self.vocab_size,
            max_model_len,
            self.eos_token_ids,
            config.seed,
            lambda request_id: processor.is_known(request_id) or request_id in queue,
            scheduler.validate,
            aging_seconds,
            grammars,
        )
        self._block_size = block_size
        self._abandoned: deque[OutputQueue] = deque()
        """Queues of streams that were closed before their requests were done."""

    def __repr__(self) -> str:
        counts = f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting"
        return f"<{self.milestone}.LLMEngine: {self.model_name}, {self.decoder_name}, {counts}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the counts of `stats`."""
        return html_table([self.milestone, self.model_name], list(flat(self.stats()).items()))

    @property
    def tracer(self) -> StepWatcher | None:
        """The first of the watchers that get every step; None: there is none."""
        watchers = self.step_log.watchers
        return watchers[0] if watchers else None

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests by id; for several completions, the first that is unfinished."""
        requests: dict[str, Request] = {}
        for state in self.output_processor.states.values():
            for completion in state.completions:
                if completion.finish_reason is None:
                    request = self.driver.requests[completion.completion_id]
                    requests.setdefault(state.request_id, request)
        return requests

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> Any:
            """Say what takes the place of a name that vLLM's engines have and this one lacks."""
            text = f"{type(self).__module__}.{type(self).__name__} has no attribute {name!r}"
            if name in METHODS_INSTEAD:
                text += f" of vLLM's; instead: {METHODS_INSTEAD[name]}"
            raise AttributeError(text, name=name, obj=self)

    # -- offline use -------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        use_tqdm: bool = False,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts and return when all are done.

        Args:
            prompts: one prompt or several; each text, token ids, chat messages, or vLLM's
                `{"prompt": ...}` and `{"prompt_token_ids": ...}`.
            sampling_params: one for all prompts, or one each.
            chat: take a text prompt as a user's message and apply the model's chat template.
            use_tqdm: show on stderr how many prompts are done.
            others: arguments of vLLM's, which must ask for nothing (`lora_request=None`).

        Returns:
            One output a prompt, in the order given.

        Raises:
            InputError: bad input; nothing has been queued then.
        """
        refuse_arguments("generate", others, "prompts", "sampling_params", "chat", "use_tqdm")
        encoded = self.input_processor.encode_all(prompts, sampling_params, chat)
        return self._complete(encoded, use_tqdm)

    def chat(
        self,
        messages: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, and return when all are answered.

        Args:
            messages: `[{"role": ..., "content": ...}, ...]`, or a list of these.
            sampling_params, use_tqdm, others: as `generate` takes them.
            tools: functions that the chat template shows to the model.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking`.

        Raises:
            InputError: bad input; nothing has been queued then.
        """
        refuse_arguments(
            "chat", others, "sampling_params", "use_tqdm", "tools", "chat_template_kwargs"
        )
        encoded = self.input_processor.encode_all(
            messages, sampling_params, True, template_kwargs=chat_template_kwargs, tools=tools
        )
        return self._complete(encoded, use_tqdm)

    def _complete(self, prompts: list[EncodedPrompt], use_tqdm: bool) -> list[RequestOutput]:
        queue = OutputQueue(wants_all=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(gc_young_only())
            show = stack.enter_context(progress_bar(len(prompts))) if use_tqdm else None
            outputs = stack.enter_context(
                contextlib.closing(OutputStream(self, prompts, queue, show))
            )
            for _ in outputs:
                pass
        return [state.snapshot() for state in outputs.states]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> OutputStream:
        """Yield each request's output whenever it has grown. Arguments and errors as `generate`.

        Closing the iterator early aborts the unfinished requests. The last output of a request that
        is aborted meanwhile goes to the caller of `abort`.
        """
        encoded = self.input_processor.encode_all(prompts, sampling_params, chat)
        return OutputStream(self, encoded, OutputQueue())

    # -- online use --------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        chat: bool = False,
        **others: Any,
    ) -> str:
        """Queue one request; `step` will compute it. Returns its id.

        Args:
            priority: lower is sooner, for schedulers with `policy="priority"` (from M2 on). With
                `aging_seconds`, the number falls while the request waits.
            others: as `generate` takes them.

        Raises:
            InputError: bad input; no other request is affected.
        """
        refuse_arguments("add_request", others, "sampling_params", "request_id", "priority", "chat")
        params = SamplingParams() if sampling_params is None else sampling_params
        check_priority(priority)
        encoded = self.input_processor.encode(prompt, params, chat)
        return self.driver.run(self._add_one, encoded, request_id, priority)

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            Outputs of the requests that changed, finished ones for the last time. Outputs that a
            call of `generate` or `stream` waits for are not among them.

        Raises:
            Exception: the model's forward raised. The step's requests have then ended with `error`
                (their outputs come with the next step); the others go on.
        """
        if self.output_processor.states or self.core.in_flight:
            self._abort_abandoned()
            self.driver.run(self.driver.step)
        return self._step_queue.take()

    def take_outputs(self) -> list[RequestOutput]:
        """Return outputs that are kept for the next `step`. After a `step` that raised, these are
        the outputs of its requests, which ended with `error`."""
        return self._step_queue.take()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state, and return its last output; None if the request is not (or no
        longer) known."""
        check_is_id(request_id)
        state = self.driver.run(self._abort, request_id)
        if state is None:
            return None
        output = state.snapshot()
        state.queue.discard(request_id)  # after an interruption before here, `step` delivers it
        return output

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give: requests to compute, or outputs kept for it."""
        return bool(self.output_processor.states or self._step_queue)

    def is_taken(self, request_id: str) -> bool:
        """Whether an id belongs to a request, or completion, that is unfinished or undelivered."""
        check_is_id(request_id)
        return self.input_processor.is_taken(request_id)

    # -- changes, one thread at a time -------------------------------------------------------

    def _add_one(self, prompt: EncodedPrompt, request_id: str | None, priority: int) -> str:
        requests = self.input_processor.make(*prompt, request_id, priority)
        return self._queue(requests, self._step_queue).request_id

    def _add_all(self, prompts: list[EncodedPrompt], queue: OutputQueue) -> list[RequestState]:
        made = self.input_processor.make_all(prompts)
        return [self._queue(requests, queue) for requests in made]

    def _queue(self, requests: list[Request], queue: OutputQueue) -> RequestState:
        """Queue the completions of a prompt; their outputs go to `queue`."""
        self.driver.add(requests)
        completion_ids = [each.request_id for each in requests]
        first = requests[0]
        return self.output_processor.add(
            completion_ids, first.prompt_token_ids, first.sampling_params, queue
        )

    def _abort(self, request_id: str) -> RequestState | None:
        state = self.output_processor.states.get(request_id)
        if state is not None:
            # Forks come before what they fork from.
            ids = [each.completion_id for each in reversed(state.completions)]
            self.driver.finish(ids, "abort")
        return state

    def _abort_abandoned(self) -> None:
        """End the requests of streams that were closed. In the middle of a step this is left to the
        next step: the garbage collector may close a stream anywhere."""
        if self._abandoned and not self.driver.is_inside():
            self.driver.run(self._abort_unread)

    def _abort_unread(self) -> None:
        while self._abandoned:
            for request_id in list(self._abandoned[0].unfinished):
                self._abort(request_id)
            self._abandoned.popleft()

    # -- before and after --------------------------------------------------------------------

    def warm_up(self) -> None:
        """Do the work that a first request would have to wait for. No count and no seed changes.

        Raises:
            RuntimeError: there are requests already.
        """
        if num_requests := len(self.output_processor.states):
            raise RuntimeError(f"warm_up is for the start; there are {num_requests} requests")
        sizes = [min(size, self.config.max_num_seqs) for size in self.warm_up_sizes]
        self.driver.run(warm_up, self.driver, sizes, self._block_size)

    def stats(self) -> dict[str, Any]:
        """Return counts since the engine was built, and the present state of queues and KV
        memory."""
        counts, scheduler = self.step_log.counts, self.scheduler
        useful = counts["prefill_tokens"] + counts["decode_tokens"]
        computed = useful + counts["padding_tokens"]
        kv = scheduler.kv_usage()
        milestone = scheduler.stats()
        of_kv = milestone.get("kv", {})
        num_bytes = kv_bytes_per_token(
            self.model, self.config.kv_dtype, num_layers=of_kv.get("num_layers")
        )
        return {
            "decoder": self.decoder_name,
            **counts,
            "useful_share": (useful - counts["recomputed_tokens"]) / computed if computed else 1.0,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            **milestone,
            "kv": {
                **asdict(kv),
                "free": kv.free,
                "bytes_per_token": num_bytes,
                **of_kv,
            },
        }


class OutputStream:
    """The iterator that `stream` returns: the output of each request, whenever it has grown.

    Requests that are not done when the iterator is closed or thrown away are aborted.

    Args:
        queue: takes the outputs; only this stream reads it.
        show: called after each step with the number of unfinished requests.
    """

    def __init__(
        self,
        engine: BaseEngine,
        prompts: list[EncodedPrompt],
        queue: OutputQueue,
        show: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._show = show
        self._queue = queue
        self._taken: deque[RequestOutput] = deque()
        try:
            self.states = engine.driver.run(engine._add_all, prompts, queue)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> RequestOutput:
        engine, queue = self._engine, self._queue
        try:
            while not self._taken:
                is_done = not queue.unfinished
                if not is_done:
                    engine._abort_abandoned()
                    engine.driver.run(engine.driver.step)
                    if self._show is not None:
                        self._show(len(queue.unfinished))
                self._taken.extend(queue.take())
                if is_done:  # the outputs just taken came from another caller's step
                    break
        except BaseException:  # Ctrl-C or an error: abort all requests of the stream
            self.close()
            raise
        if not self._taken:
            raise StopIteration
        return self._taken.popleft()

    def close(self) -> None:
        """Abort the requests that are not done."""
        self._taken.clear()
        if self._queue.unfinished:
            self._engine._abandoned.append(self._queue)  # the abort is not lost if interrupted
            self._engine._abort_abandoned()

    __del__ = close
