"""The trace's record of an engine step, with the same schema in every milestone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, TypeAdapter
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from milestone_llm.core.block_hashes import hash_blocks
from milestone_llm.core.kv import NULL_BLOCK, KVEvent, KVUsage
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.step_log import LoggedStep

from .device_times import DeviceTimes

_OF_SOME = ("further_blocks", "num_draft_tokens", "num_accepted_tokens", "num_allowed_tokens")
"""Fields of a row that are written only if they are not 0 or empty."""

_CAUSES = {
    "admitted": {"alloc", "share"},
    "resumed": {"alloc", "share", "swap_in"},
    "preempted": {"swap_out", "free"},
    "finished": {"free"},
}
"""KV events that follow from each kind of change of a request."""
_CHANGES = {"copy_on_write", "swap_out", "swap_in"}
"""KV events that count as a change; the others are in every step that decodes."""
_UNITS = ("token", "region", "block")
_EVENT_TYPES = ("alloc", "free", "share", "copy_on_write", "evict", "swap_out", "swap_in")


@dataclass(frozen=True)
class BatchRow:
    """One row of a step's batch, as the step computed it."""

    request_id: str
    phase: Annotated[str, Field(pattern="^(prefill|decode|padding)$")]
    start: NonNegativeInt
    num_new_tokens: NonNegativeInt
    num_cached_tokens: NonNegativeInt
    sampled_token: NonNegativeInt | None
    """The last sampled token; with draft tokens there may be several."""
    blocks: list[int]
    """Block table; -1 where a block has been given back."""
    further_blocks: list[list[int]] = field(default_factory=list)
    """Block tables in further groups of layers."""
    num_draft_tokens: NonNegativeInt = 0
    """Draft tokens that were computed with the row. Accepted ones count in `num_new_tokens`."""
    num_accepted_tokens: NonNegativeInt = 0
    """Number of draft tokens that were accepted."""
    num_allowed_tokens: NonNegativeInt = 0
    """Number of tokens that a grammar allows; 0: there is no grammar."""

    @property
    def held(self) -> list[int]:
        """Blocks in all groups of layers that have not been given back."""
        tables = (self.blocks, *self.further_blocks)
        return [block for table in tables for block in table if block != NULL_BLOCK]

    @property
    def end(self) -> int:
        """Tokens of its request that are in the KV cache after the step."""
        return self.start + self.num_new_tokens

    @classmethod
    def of(cls, row: ScheduledRequest, sampled: Mapping[str, list[SampledToken]]) -> BatchRow:
        """Return an executed row with its token: None inside a prompt, or if logits had a NaN."""
        tokens = [] if row.is_padding else sampled.get(row.request.request_id, [])
        return cls(
            request_id=row.request.request_id,
            phase=row.phase,
            start=row.start,
            num_new_tokens=row.num_new_tokens,
            num_cached_tokens=row.num_cached_tokens,
            sampled_token=tokens[-1].token_id if tokens and tokens[-1].token_id >= 0 else None,
            blocks=row.blocks,
            further_blocks=row.group_blocks[1:],
            **row.figures,
        )


class Prompt(TypedDict):
    """Facts about a request when it arrives."""

    priority: float
    num_tokens: NonNegativeInt
    hashes: list[str]
    """Hashes of its full blocks. Each covers all tokens before it: equal hashes mean an equal
    beginning."""


class ExpertLoad(TypedDict):
    """Which experts the tokens of a step met, in a model of experts that m5_kernels computes."""

    num_experts: NonNegativeInt
    """Experts of a layer."""
    num_met: NonNegativeFloat
    """Experts of a layer that at least one token met: the mean over the layers that have experts.
    The weights of so many are read."""
    largest_share: NonNegativeFloat
    """Share of the most popular expert, of all pairs of a token and an expert in its layer; the
    largest over all layers."""


class Change(TypedDict):
    """A request that was preempted or finished, and the reason."""

    request_id: str
    reason: str


@dataclass
class StepRecord:
    """One engine step. `batch` is what was computed; queues and `kv` are those after the step.

    m5_kernels finishes a step after it has planned the next one: there, queues and `kv` are one
    plan ahead. `start_s` is seconds since the trace began. `arrived` are requests that came after
    the step before was planned. `waiting_reasons` has the scheduler's reason for requests at the
    head of the queue; all others wait for these. `events` are in the order in which they happened:
    those of planning, then all until the next step was planned.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)

    step: NonNegativeInt
    milestone: str
    schedule_ms: NonNegativeFloat
    execute_ms: NonNegativeFloat
    update_ms: NonNegativeFloat
    batch: list[BatchRow]
    num_prefill_tokens: NonNegativeInt
    num_decode_tokens: NonNegativeInt
    num_padding_tokens: NonNegativeInt
    start_s: NonNegativeFloat
    waiting: list[str]
    running: list[str]
    swapped: list[str]
    waiting_reasons: dict[str, str]
    arrived: list[str]
    admitted: list[str]
    resumed: list[str]
    preempted: list[Change]
    finished: list[Change]
    kv: KVUsage
    events: list[KVEvent]
    policy: str = "fcfs"
    prompts: dict[str, Prompt] = field(default_factory=dict)
    """Facts about the requests in `arrived`."""
    device: DeviceTimes | None = None
    """Set for a step that was profiled."""
    expert_load: ExpertLoad | None = None
    """Set for a model of experts, by m5_kernels' fused decoder."""

    @classmethod
    def of(
        cls, step: LoggedStep, scheduler: BaseScheduler, start: float | None = None
    ) -> StepRecord:
        """Return the record of a settled step.

        Args:
            scheduler: its queues and KV memory are read now.
            start: when the trace began, in seconds of `time.perf_counter()`; None: now.
        """
        plan = step.plan
        schedule_ms, execute_ms, update_ms = (
            round((end - start) * 1e3, 3) for start, end in pairwise(step.times)
        )
        num_decode_tokens = sum(row.num_new_tokens for row in plan.rows if row.phase == "decode")
        queued = list(scheduler.waiting)
        figures: dict[str, Any] = step.figures
        return cls(
            step=step.number,
            milestone=step.milestone,
            schedule_ms=schedule_ms,
            execute_ms=execute_ms,
            update_ms=update_ms,
            batch=[BatchRow.of(row, step.sampled) for row in plan.rows],
            num_prefill_tokens=plan.num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            num_padding_tokens=plan.num_padding_tokens,
            start_s=0.0 if start is None else round(step.times[0] - start, 6),
            waiting=_ids(r for r in queued if r.status is RequestStatus.WAITING),
            running=_ids(scheduler.running),
            swapped=_ids(r for r in queued if r.status is RequestStatus.SWAPPED),
            waiting_reasons=plan.waiting_reasons,
            arrived=step.arrived,
            admitted=_ids(plan.admitted),
            resumed=_ids(plan.resumed),
            preempted=[
                {"request_id": p.request.request_id, "reason": p.reason} for p in plan.preempted
            ],
            finished=[{"request_id": name, "reason": reason} for name, reason in step.finished],
            kv=scheduler.kv_usage(),
            events=step.events,
            policy=scheduler.waiting.policy,
            prompts=_prompts(step, scheduler),
            **figures,
        )

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Return the record that `to_dict` wrote. A trace may come from a stranger: all is checked.

        Raises:
            ValueError: a field is missing or of a wrong type, or a block is not in the pool.
        """
        record = _READER.validate_json(line)
        kv, kinds = record.kv, {event.type for event in record.events}
        if kv.unit not in _UNITS or not kinds <= {*_EVENT_TYPES}:
            raise ValueError(f"kv.unit is one of {_UNITS}, the type of an event of {_EVENT_TYPES}")
        if any(isinstance(number, int) and number < 0 for number in vars(kv).values()):
            raise ValueError(f"a number below 0 in {kv}")
        named = [row.held for row in record.batch] + [event.blocks for event in record.events]
        for block in chain.from_iterable(named) if kv.unit != "token" else ():
            if not 0 <= block < kv.total:
                raise ValueError(f"block {block} is named, but kv.total is {kv.total}")
        return record

    @property
    def requests(self) -> set[str]:
        """Ids of all requests in the batch, the queues or `arrived`."""
        rows = (row.request_id for row in self.batch)
        return {*rows, *self.arrived, *self.waiting, *self.running, *self.swapped}

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data, as in a JSON line."""
        data = dict(vars(self))
        data["batch"] = [
            {name: value for name, value in vars(row).items() if name not in _OF_SOME or value}
            for row in self.batch
        ]
        data["kv"] = {**vars(self.kv), "free": self.kv.free}
        data["events"] = [
            {name: value for name, value in vars(event).items() if name != "held" or value}
            for event in self.events
        ]
        for name in ("device", "expert_load"):
            if data[name] is None:
                del data[name]
        return data


_READER = TypeAdapter(StepRecord)


def _prompts(step: LoggedStep, scheduler: BaseScheduler) -> dict[str, Prompt]:
    if not step.arrived:
        return {}
    kv, rows = scheduler.kv_usage(), (row.request for row in step.plan.rows)
    here = {each.request_id: each for each in chain(scheduler.waiting, scheduler.running, rows)}
    block_size = kv.reserved_tokens // kv.used if kv.unit == "block" and kv.used else 0
    return {name: _prompt(here[name], block_size) for name in step.arrived if name in here}


def _prompt(request: Request, block_size: int) -> Prompt:
    tokens, salt = request.prompt_token_ids, request.sampling_params.cache_salt
    names = hash_blocks(tokens, block_size, salt) if block_size else []
    hashes = [name.hex()[:8] for name in names]
    return {"priority": request.priority, "num_tokens": len(tokens), "hashes": hashes}


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


@dataclass(frozen=True)
class StepEvent:
    """An event: `arrived`, a key of `_CAUSES`, or the type of a KV event, which has blocks.

    `release` is a `free` of blocks that other requests still hold.
    """

    kind: str
    request_id: str | None
    reason: str = ""
    blocks: list[int] = field(default_factory=list)


def step_events(record: StepRecord) -> Iterator[StepEvent]:
    """Yield the events of a step, of requests and of KV memory, in the order of happening.

    A request's event comes just before the KV events that it causes: a request is preempted, then
    its blocks are freed. Requests without KV events are last: they held no blocks, or the milestone
    is m1_single.
    """
    yield from (StepEvent("arrived", name) for name in record.arrived)
    changes = [StepEvent("preempted", one["request_id"], one["reason"]) for one in record.preempted]
    changes += [StepEvent("resumed", name) for name in record.resumed]
    changes += [StepEvent("admitted", name) for name in record.admitted]
    changes += [StepEvent("finished", one["request_id"], one["reason"]) for one in record.finished]
    for event in record.events:
        for change in changes:
            if change.request_id == event.request_id and event.type in _CAUSES[change.kind]:
                yield change
                changes.remove(change)
                break
        own = [block for block in event.blocks if block not in event.held]
        for kind, blocks in ((event.type, own), ("release", event.held)):
            if blocks:
                yield StepEvent(kind, event.request_id, blocks=blocks)
    yield from changes


def steps_with_changes(records: list[StepRecord]) -> list[StepRecord]:
    """Return the first step, the last, and each in which something changed.

    A change is: a request began to wait, was admitted, finished, preempted or resumed; a block was
    copied or swapped; the number of rows in a phase differs from the step before.
    """
    changed = [after for before, after in pairwise(records) if _has_change(before, after)]
    steps = {record.step for record in [*records[:1], *changed, *records[-1:]]}
    return [record for record in records if record.step in steps]


def _has_change(before: StepRecord, record: StepRecord) -> bool:
    phases, phases_before = (Counter(row.phase for row in one.batch) for one in (record, before))
    return bool(
        phases != phases_before
        or set(record.waiting) - set(before.waiting)
        or record.admitted
        or record.finished
        or record.preempted
        or record.resumed
        or any(event.type in _CHANGES for event in record.events)
    )
