"""The engine: requests in, `step()` by `step()`, outputs out. Written once, for all milestones.

A step is schedule, execute, update, record. Later milestones subclass `LLMEngine` and build another
scheduler and another runner; the loop stays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from m1_single.runner import ModelRunner
from m1_single.scheduler import Scheduler
from milestone_llm.models.checkpoint import DEFAULT_MODEL, load_model, max_position, stop_token_ids
from milestone_llm.trace.tracer import BatchRow, StepRecord, Tracer, batch_rows

from .config import EngineConfig
from .inputs import Prompt
from .intake import RequestIntake
from .plan import StepPlan
from .request import Request, RequestOutput, SampledToken
from .sampling_params import SamplingParams


class LLMEngine(RequestIntake):
    """A language model and the loop that serves requests on it.

    Args:
        model: Hugging Face id or local folder, GGUF file, "smollm2-135m", "tiny-llama" (random
            weights; also other families), or a ready `PreTrainedModel`.
        tokenizer: for a ready model; without one prompts are token ids and `text` stays empty.
        fields: fields of `EngineConfig`.

    Raises:
        ValueError: an unknown field, or limits that do not go together.
    """

    milestone: ClassVar[str] = "m1_single"
    config_class: ClassVar[type[EngineConfig]] = EngineConfig
    can_share_kv: ClassVar[bool] = False
    """Whether one prompt can have several completions (`SamplingParams.n`)."""

    def __init__(self, model: Any = DEFAULT_MODEL, *, tokenizer: Any = None, **fields: Any) -> None:
        self.config: Any = self.config_class.from_fields(**fields)
        loaded = load_model(model, tokenizer, dtype=self.config.dtype, device=self.config.device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.model_name = loaded.name
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.eos_token_ids = stop_token_ids(self.model)
        self.max_model_len = self.config.resolve_max_model_len(max_position(self.model))
        self.tracer = Tracer.from_option(self.config.trace)
        self.scheduler: Any = self.build_scheduler()
        self.runner: Any = self.build_runner()

        self.requests: dict[str, Request] = {}  # unfinished ones, without further completions
        self._num_arrivals = 0
        self._undelivered: list[RequestOutput] = []
        self._counts = dict.fromkeys(
            ("steps", "rows", "prefill_tokens", "decode_tokens", "padding_tokens", "finished"), 0
        )

    def build_scheduler(self) -> Any:
        """The scheduler of this milestone."""
        return Scheduler(self.config, self.max_model_len)

    def build_runner(self) -> Any:
        """The model runner of this milestone."""
        return ModelRunner(self.model)

    # -- offline use -------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
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
        requests = self._submit(prompts, sampling_params, chat)
        for _ in self._run(requests):
            pass
        return [RequestOutput.from_request(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output whenever it has grown.

        Closing the iterator early aborts what is unfinished.
        """
        outputs = self._run(self._submit(prompts, sampling_params, chat))
        next(outputs)  # a generator that was never entered would not abort on `close`
        return outputs

    def _run(self, requests: list[Request]) -> Iterator[Any]:
        """Step until these requests are done; yield their outputs, keep those of others.

        The first thing yielded is None, before any step.
        """
        own = {request.request_id for request in requests}
        try:
            yield None
            while not all(request.is_done for request in requests):
                self._undelivered += self._step()
                yield from self._take_undelivered(own)
            yield from self._take_undelivered(own)  # computed in a step that another caller made
        finally:  # Ctrl-C, an error, a closed iterator: leave nothing behind
            for request in requests:
                if not request.is_done:
                    self.abort(request.request_id)
            self._take_undelivered(own)

    def _take_undelivered(self, own: set[str]) -> list[RequestOutput]:
        """Outputs of these requests that nobody has had yet; those of others stay."""
        taken = [output for output in self._undelivered if output.request_id in own]
        self._undelivered = [out for out in self._undelivered if out.request_id not in own]
        return taken

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
        request = self._make_request(prompt, params, request_id, priority, chat)
        self._enqueue(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            Outputs of the requests that changed, finished ones for the last time.

        Raises:
            Exception: what the model's forward raised. The step's requests have then ended with
                `error` (their outputs come with the next step); waiting ones go on.
        """
        outputs = self._step() if self.requests else []
        undelivered, self._undelivered = self._undelivered, []
        return undelivered + outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; None if it is not (or no longer) known."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for completion in reversed(request.completions):  # forks before what they fork from
            if not completion.is_finished:
                self.scheduler.abort(completion)
        return RequestOutput.from_request(request)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give: requests to compute, or outputs kept for it."""
        return bool(self.requests or self._undelivered)

    def stats(self) -> dict[str, Any]:
        """Counts since the engine was built, and the state of queues and KV memory now."""
        counts = dict(self._counts)
        counts["finished"] += len(self.scheduler.ended)  # aborted since the last step
        useful = counts["prefill_tokens"] + counts["decode_tokens"]
        computed = useful + counts["padding_tokens"]
        kv = self.scheduler.kv_usage()
        return {
            **counts,
            "useful_share": useful / computed if computed else 1.0,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "kv": {**asdict(kv), "free": kv.free},
        }

    # -- the loop ----------------------------------------------------------------------------

    def _step(self) -> list[RequestOutput]:
        times = [time.perf_counter()]
        plan = self.scheduler.schedule()
        assert plan.rows, "the scheduler has unfinished requests but plans nothing"
        times.append(time.perf_counter())
        self._note_first_scheduled(plan, times[-1])
        sampled: dict[str, SampledToken] = {}
        rows: list[BatchRow] = []
        try:
            sampled = self.runner.execute(plan)
        except BaseException:  # Ctrl-C too: the KV cache is half written
            self._undelivered += self.scheduler.fail(plan)
            with contextlib.suppress(Exception):  # on a broken device the first error is the one
                self._recover()
            raise
        else:
            times.append(time.perf_counter())
            rows = self._trace_rows(plan, sampled)  # before `update` frees their blocks
            outputs = self.scheduler.update(plan, sampled)
            return outputs
        finally:
            times += [time.perf_counter()] * (4 - len(times))
            self._close_step(plan, rows or self._trace_rows(plan, sampled), times)

    def _recover(self) -> None:
        """After a step that raised: what it left must not reach those who come after."""
        self.runner.recover()

    def _note_first_scheduled(self, plan: StepPlan, now: float) -> None:
        for request in plan.admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now

    def _close_step(self, plan: StepPlan, rows: list[BatchRow], times: list[float]) -> None:
        """Count, record and check what the step did, whether it worked or raised."""
        ended = self.scheduler.take_ended()
        for request in ended:
            leader: Request = request.leader or request
            # By now, the id of an aborted request may belong to a new one.
            if request.is_done and self.requests.get(leader.request_id) is leader:
                del self.requests[leader.request_id]
        num_decode_tokens = sum(row.phase == "decode" for row in plan.rows)
        num_prefill_tokens = plan.num_tokens - num_decode_tokens
        self._counts["steps"] += 1
        self._counts["rows"] += len(plan.rows)
        self._counts["prefill_tokens"] += num_prefill_tokens
        self._counts["decode_tokens"] += num_decode_tokens
        self._counts["padding_tokens"] += plan.num_padding_tokens
        self._counts["finished"] += len(ended)
        events = self.scheduler.drain_events()
        if self.tracer is not None:
            self.tracer.record(
                StepRecord.of(
                    step=self._counts["steps"] - 1,
                    milestone=self.milestone,
                    times=times,
                    plan=plan,
                    rows=rows,
                    scheduler=self.scheduler,
                    finished=ended,
                    events=events,
                )
            )
        if self.config.check_invariants:
            self.scheduler.check_invariants()

    def _trace_rows(self, plan: StepPlan, sampled: dict[str, SampledToken]) -> list[BatchRow]:
        return batch_rows(plan, sampled) if self.tracer else []
