"""Scripted traffic through a scheduler, step by step; what went otherwise is said in words.

A step is written as a line: `a[4:5] b[0:6] +b` has a row with token 4 of a and one with tokens 0 to
5 of b, which was admitted. `^b` was resumed, `-b` preempted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request

from .check import Wrong, explained
from .device import Ask, ListDevice, next_token

SHOWN = 6
"""Steps before the one that went wrong, in a message."""


@dataclass(frozen=True)
class At:
    """What a step must be."""

    line: str
    why: str = ""
    waits: Mapping[str, str] = field(default_factory=dict)
    """What is in each reason that `plan.waiting_reasons` must give, by request; `|` parts words of
    which one will do."""


Action = tuple[str, Callable[[Any, dict[str, Request]], object]]
"""What happens after a step: in words, and as a function of the scheduler and all requests."""


def play(
    scheduler: Any,
    arrivals: Mapping[int, Sequence[Ask]],
    expected: Sequence[At],
    actions: Mapping[int, Action] | None = None,
    is_whole: bool = True,
) -> None:
    """Serve scripted traffic.

    Args:
        arrivals: who comes before which step.
        actions: what happens after which step.
        is_whole: whether nobody is left after the last step.

    Raises:
        Wrong: a step is not as expected, memory is lost, or a request gets wrong tokens.
        NotImplementedError: what is not written yet.
    """
    _Play(scheduler, arrivals, expected, actions or {}).run(is_whole)


class _Play:
    def __init__(
        self,
        scheduler: Any,
        arrivals: Mapping[int, Sequence[Ask]],
        expected: Sequence[At],
        actions: Mapping[int, Action],
    ) -> None:
        self.scheduler, self.arrivals = scheduler, arrivals
        self.expected, self.actions = expected, actions
        self.lines: list[str] = []
        self.requests: dict[str, Request] = {}
        self.block_size = getattr(scheduler.config, "block_size", scheduler.max_model_len)
        self.device = ListDevice(self.block_size)
        self.told: dict[str | None, list[int]] = {}
        """Memory of each request as events tell it."""

    def run(self, is_whole: bool) -> None:
        """Raises `Wrong` with the whole story."""
        step = 0
        try:
            for step, at in enumerate(self.expected):
                self._step(step, at)
            left = [r.request_id for r in self.requests.values() if not r.is_finished]
            if left and is_whole:
                raise Wrong(f"All should be done after this step, but {_and(left)} would go on.")
            for request in self.requests.values():
                if request.finish_reason == "length":
                    _check_tokens(request)
        except NotImplementedError:
            raise
        except Wrong as wrong:
            raise Wrong(f"{self._story(step)}\n\n{wrong}") from None
        except Exception as error:
            running = _and([request.request_id for request in self.scheduler.running])
            state = f"By then: running {running}; {self.scheduler.kv!r}."
            if not self.scheduler.kv_usage().free:
                state += " No KV memory was left to give."
            raise Wrong(f"{self._story(step)}\n\n{explained(error)}\n\n{state}") from error

    def _step(self, step: int, at: At) -> None:
        for ask in self.arrivals.get(step, ()):
            requests = ask.requests(len(self.requests), self.block_size)
            self.requests |= {each.request_id: each for each in requests}
            self.scheduler.add(*requests)
        waiting = list(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        if not isinstance(plan, StepPlan):
            raise Wrong(f"schedule() must return a StepPlan, it returned {plan!r}.")
        self.lines.append(line_of(plan))
        if self.lines[-1] != at.line:
            cause = difference(plan, at.line, self.scheduler, waiting)
            why = f"\nWhy: {at.why}" if at.why else ""
            raise Wrong(f"{cause}{why}")
        self._check_reasons(plan, at)
        self.scheduler.update(plan, self.device.run(plan))
        self._check_events()
        if step in self.actions:
            self.lines[-1] += f"\n           after it, {self.actions[step][0]}"
            self.actions[step][1](self.scheduler, self.requests)
        self._check_memory()

    def _check_reasons(self, plan: StepPlan, at: At) -> None:
        for name, word in at.waits.items():
            reason = plan.waiting_reasons.get(name)
            if reason is None:
                raise Wrong(
                    f"{name} waits, and the plan does not say why: plan.waiting_reasons is "
                    f"{plan.waiting_reasons}. Whoever reads the trace wants to know."
                )
            if not re.search(word, reason):
                raise Wrong(f"{name} waits for another reason than {reason!r}: {at.why}")

    def _owned(self) -> tuple[str, dict[str, Any]]:
        kv = self.scheduler.kv
        return ("region", kv.regions) if hasattr(kv, "regions") else ("blocks", kv.block_tables)

    def _check_events(self) -> None:
        """What events tell is what the tables are."""
        unit, owned = self._owned()
        for event in self.scheduler.drain_events():
            told = self.told.setdefault(event.request_id, [])
            if event.type in ("alloc", "share"):
                told += event.blocks
            elif event.type == "copy_on_write":
                told[:] = [event.blocks[1] if each == event.blocks[0] else each for each in told]
            elif event.type == "free":
                told.clear()
        for name in self.requests:
            own, told = owned.get(name, []), self.told.get(name, [])
            if told != (own if isinstance(own, list) else [own]):
                state = f"{unit} {own}" if name in owned else f"no {unit}"
                raise Wrong(
                    f"After this step {name} owns {state}, but self.events tell of "
                    f"{told}. The trace and its page know of memory only what events tell; the "
                    "methods of self.kv tell it."
                )

    def _check_memory(self) -> None:
        """Memory belongs to those who run."""
        unit, owned = self._owned()
        running = {request.request_id for request in self.scheduler.running}
        for name in sorted(owned.keys() - running):
            request = self.requests[name]
            state = "has finished" if request.is_finished else "does not run any more"
            raise Wrong(
                f"After this step {name} {state} and still owns its {unit} {owned[name]}: nobody "
                "else can use that memory."
            )
        for name in sorted(running - owned.keys()):
            raise Wrong(f"After this step {name} runs and owns no {unit}.")
        try:
            self.scheduler.check_invariants()
        except AssertionError as error:
            raise Wrong(f"After this step the books of KV memory are wrong: {error}.") from None

    def _story(self, step: int) -> str:
        config = self.scheduler.config
        values = {each.name: getattr(config, each.name) for each in fields(config)}
        defaults = {each.name: each.default for each in fields(config)}
        settings = [f"{name}={value}" for name, value in values.items() if value != defaults[name]]
        if (num_blocks := getattr(self.scheduler, "num_blocks", None)) is not None:
            settings.append(f"blocks: {num_blocks}")
        lines = ["With " + ", ".join(settings), ""]
        first = max(0, step - SHOWN)
        for number, asks in self.arrivals.items():
            if number <= step:
                lines += [f"  before step {number}  comes {ask}" for ask in asks]
        lines += [""] if self.lines else []
        lines += ["  ..."] if first else []
        for number, line in list(enumerate(self.lines))[first:]:
            lines.append(f"  step {number:<3} {line or '(nothing)'}")
        if len(self.lines) > step and not self.lines[step].startswith(self.expected[step].line):
            lines.append(f"  expected {self.expected[step].line}")
        lines.append(
            "\n  a[4:6]: a row of a's tokens 4 and 5; +a admitted, ^a resumed, -a preempted"
        )
        return "\n".join(lines)


def line_of(plan: StepPlan) -> str:
    """A plan as a line."""
    parts = [f"{row.request.request_id}[{row.start}:{row.end}]" for row in plan.rows]
    parts += [f"+{request.request_id}" for request in plan.admitted]
    parts += [f"^{request.request_id}" for request in plan.resumed]
    parts += [f"-{preemption.request.request_id}" for preemption in plan.preempted]
    return " ".join(parts)


def lines_of(scheduler: Any, arrivals: Mapping[int, Sequence[Ask]]) -> list[str]:
    """What a scheduler that is right makes of traffic."""
    block_size = getattr(scheduler.config, "block_size", scheduler.max_model_len)
    device, lines, num_requests = ListDevice(block_size), list[str](), 0
    while len(lines) <= max(arrivals) or scheduler.has_unfinished_requests():
        for ask in arrivals.get(len(lines), ()):
            scheduler.add(*ask.requests(num_requests, block_size))
            num_requests += ask.n
        plan = scheduler.schedule()
        scheduler.update(plan, device.run(plan))
        lines.append(line_of(plan))
    return lines


def difference(plan: StepPlan, expected: str, scheduler: Any, waiting: Sequence[Request]) -> str:
    """What is wrong with a plan, the cause before its consequences.

    Args:
        expected: the line that it should be.
        waiting: the queue before the plan was made.
    """
    wanted = {n: (int(s), int(e)) for n, s, e in re.findall(r"(\S+)\[(\d+):(\d+)\]", expected)}
    names = [row.request.request_id for row in plan.rows]
    queue = [request.request_id for request in waiting]
    config = scheduler.config
    for row in plan.rows:
        name = row.request.request_id
        if row.request.is_finished:
            return f"{name} has finished and has a row: it is computed in vain."
        if names.count(name) > 1:
            return f"{name} has {names.count(name)} rows in one step."
    preempted = [each.request.request_id for each in plan.preempted]
    should_go = re.findall(r"-(\S+)", re.sub(r"\[.*?\]", "", expected))
    if preempted != should_go:
        return f"Preempted: {_and(preempted)}. Expected: {_and(should_go)}."
    for name in set(preempted) & set(names):
        return f"{name} is preempted, and has a row in the same step."
    for name in names:
        if name in queue and name not in wanted:
            ahead = [other for other in queue[: queue.index(name)] if other not in names]
            if ahead:
                return (
                    f"{name} is admitted, while {ahead[0]}, which is before it in the queue, waits."
                )
    if len(plan.rows) > config.max_num_seqs:
        return f"The step has {len(plan.rows)} rows: max_num_seqs={config.max_num_seqs}."
    if plan.num_tokens > config.max_num_batched_tokens:
        return (
            f"The rows add up to {plan.num_tokens} tokens: "
            f"max_num_batched_tokens={config.max_num_batched_tokens}."
        )
    for name in names:
        if name not in wanted:
            return f"{name} has a row and should have none in this step."
    for name in wanted:
        if name not in names:
            state = "waits, and should be admitted" if name in queue else "is running"
            return f"{name} has no row in this step: it {state}."
    for row in plan.rows:
        name = row.request.request_id
        if (row.start, row.end) != wanted[name]:
            start, end = wanted[name]
            return (
                f"{name}'s row begins at token {row.start} and has {row.num_new_tokens}; it should "
                f"begin at {start} and have {end - start}."
            )
    if names != list(wanted):
        return f"The rows are in the order {_and(names)}; expected: {_and(list(wanted))}."
    notes = {"+": plan.admitted, "^": plan.resumed}
    for mark, what in (("+", "admitted"), ("^", "resumed")):
        told = [request.request_id for request in notes[mark]]
        wants = re.findall(rf"\{mark}(\S+)", expected)
        if told != wants:
            return f"plan.{what} has {_and(told)}; it should have {_and(wants)}."
    return "The line differs."


def _check_tokens(request: Request) -> None:
    """A request that ran to its end got what it would have got alone."""
    tokens = list(request.prompt_token_ids)
    for position in range(request.num_output_tokens):
        tokens.append(next_token(tokens, request.seed))
        if tokens != request.token_ids[: len(tokens)]:
            raise Wrong(
                f"Output token {position} of {request.request_id} is not what it gets alone."
            )


def _and(names: Sequence[str]) -> str:
    return ", ".join(names) or "nobody"
