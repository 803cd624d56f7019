"""Scripted traffic through a scheduler, step by step. A message says in words which step is wrong.

A script has a line for each step, as it should be, and why:

    comes a(4, 9) b(AB+2, 3, n=2)     before the next step: a, 4 tokens, 9 to generate; b, whose
                                      prompt is the blocks A and B and 2 tokens, two completions
    a[0:4] b[0:10] +a +b   # why      rows with tokens 0 to 3 of a and 0 to 9 of b, both admitted
    a[4:5] -b, c waits                b is preempted; c waits, for a reason in the reader's words
    then b is aborted                 done by the function that is given with the script
    b[0:10] ^b                        b is resumed
    nothing                           a step without rows
    ...                               it would go on: requests are left
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request

from .check import Wrong, explained
from .device import Ask, ListDevice

SHOWN = 6
"""Number of steps shown before the wrong one, in a message."""
_ASK = re.compile(r"(\w+)\(([A-Z]*)\+?(\d*), (\d+)(?:, (n|priority)=(\d+))?\)")

Then = Callable[[Any, dict[str, Request]], object]
"""An action after a step, on the scheduler and all requests by their ids."""


@dataclass
class At:
    """The expected plan of a step."""

    line: str
    why: str = ""
    waits: Sequence[str] = ()
    """Requests that must have a reason in `plan.waiting_reasons`, in words of the reader's own."""
    then: str = ""
    """Words for the action after the step, if there is one."""


def read_script(text: str) -> tuple[dict[int, list[Ask]], list[At], bool]:
    """Return the requests that come before each step, the expected steps, and whether no request is
    left after them."""
    arrivals, expected, is_whole = dict[int, list[Ask]](), list[At](), True
    for line in filter(None, map(str.strip, text.splitlines())):
        words, _, why = (part.strip() for part in line.partition("#"))
        if words.startswith("comes "):
            arrivals[len(expected)] = [_ask(*parts) for parts in _ASK.findall(words)]
        elif words.startswith("then "):
            expected[-1].then = words.removeprefix("then ")
        elif words == "...":
            is_whole = False
        elif words:
            plan, _, waits = words.removeprefix("nothing").partition(", ")
            expected.append(At(plan, why, re.findall(r"(\S+) waits", waits)))
        else:  # the reason goes on
            expected[-1].why = f"{expected[-1].why} {why}".strip()
    return arrivals, expected, is_whole


def _ask(name: str, blocks: str, own: str, max_tokens: str, key: str, value: str) -> Ask:
    more: dict[str, Any] = {key: int(value)} if key else {}
    return Ask(name, int(own or 0), int(max_tokens), prompt=blocks, **more)


def play(scheduler: Any, script: str, then: Then | None = None) -> None:
    """Serve scripted traffic.

    Args:
        then: the action of the script's "then".

    Raises:
        Wrong: a step is not as expected, or memory is lost.
        NotImplementedError: a function is not written yet.
    """
    arrivals, expected, is_whole = read_script(script)
    compare(scheduler, arrivals, expected, then, is_whole)


def compare(
    scheduler: Any,
    arrivals: Mapping[int, Sequence[Ask]],
    expected: Sequence[At],
    then: Then | None = None,
    is_whole: bool = True,
) -> None:
    """Serve the traffic of a script that has been read, as `play` does."""
    served = _Play(scheduler, arrivals)
    try:
        for at in expected:
            served.step(at)
            if at.then and then:
                served.then[served.number] = at.then
                then(scheduler, served.requests)
                served.check_memory()
        left = [r.request_id for r in served.requests.values() if not r.is_finished]
        if left and is_whole:
            raise Wrong(f"All should be done after this step, but {_and(left)} would go on.")
    except NotImplementedError:
        raise
    except Wrong as wrong:
        raise Wrong(f"{served.story(expected)}\n\n{wrong}") from None
    except Exception as error:
        running = _and([request.request_id for request in scheduler.running])
        state = f"By then: running {running}; {scheduler.kv!r}."
        if not scheduler.kv_usage().free:
            state += " No KV memory was left to give."
        raise Wrong(f"{served.story(expected)}\n\n{explained(error)}\n\n{state}") from error


def lines_of(scheduler: Any, arrivals: Mapping[int, Sequence[Ask]]) -> list[str]:
    """Return the lines that a right scheduler makes of traffic."""
    served = _Play(scheduler, arrivals)
    while len(served.lines) <= max(arrivals) or scheduler.has_unfinished_requests():
        served.step(None)
    return served.lines


class _Play:
    """Traffic as far as it has been served."""

    def __init__(self, scheduler: Any, arrivals: Mapping[int, Sequence[Ask]]) -> None:
        self.scheduler, self.arrivals = scheduler, arrivals
        self.number = 0
        """Number of the step."""
        self.lines: list[str] = []
        self.then: dict[int, str] = {}
        """Words for the actions after steps, by the step's number."""
        self.requests: dict[str, Request] = {}
        self.block_size = getattr(scheduler.config, "block_size", scheduler.max_model_len)
        self.device = ListDevice(self.block_size)

    def step(self, at: At | None) -> None:
        """Make the next step. Raises `Wrong` if it is not as expected."""
        self.number = len(self.lines)
        for ask in self.arrivals.get(self.number, ()):
            requests = ask.requests(len(self.requests), self.block_size)
            self.requests |= {each.request_id: each for each in requests}
            self.scheduler.add(*requests)
        waiting = list(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        if not isinstance(plan, StepPlan):
            raise Wrong(f"schedule() must return a StepPlan, it returned {plan!r}.")
        self.lines.append(line_of(plan))
        if at is not None:
            if self.lines[-1] != at.line:
                cause = difference(plan, at.line, self.scheduler, waiting)
                raise Wrong(f"{cause}\nWhy: {at.why}" if at.why else cause)
            _check_reasons(plan, at)
        self.scheduler.update(plan, self.device.run(plan))
        self.check_memory()

    def check_memory(self) -> None:
        """Check that memory belongs to running requests. Raises `Wrong` if not."""
        kv = self.scheduler.kv
        unit = "region" if hasattr(kv, "regions") else "blocks"
        owned = kv.regions if unit == "region" else kv.blocks.block_tables
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

    def story(self, expected: Sequence[At]) -> str:
        """Return the story so far: settings, requests that came, and the last steps."""
        config, step = self.scheduler.config, self.number
        settings = [
            f"{each.name}={value}"
            for each in fields(config)
            if (value := getattr(config, each.name)) != each.default
        ]
        if (num_blocks := getattr(self.scheduler, "num_blocks", None)) is not None:
            settings.append(f"blocks: {num_blocks}")
        lines = ["With " + ", ".join(settings), ""]
        for number, asks in self.arrivals.items():
            if number <= step:
                lines += [f"  before step {number}  comes {ask}" for ask in asks]
        lines += ["", "  ..."] if step > SHOWN else [""]
        for number, line in list(enumerate(self.lines))[max(0, step - SHOWN) :]:
            lines.append(f"  step {number:<3} {line or '(nothing)'}")
            if number in self.then:
                lines.append(f"           after it, {self.then[number]}")
        if len(self.lines) > step and self.lines[step] != expected[step].line:
            lines.append(f"  expected {expected[step].line or '(nothing)'}")
        lines.append(
            "\n  a[4:6]: a row of a's tokens 4 and 5; +a admitted, ^a resumed, -a preempted"
        )
        return "\n".join(lines)


def _check_reasons(plan: StepPlan, at: At) -> None:
    for name in at.waits:
        if not plan.waiting_reasons.get(name):
            raise Wrong(
                f"{name} waits, and the plan does not say why: plan.waiting_reasons is "
                f"{plan.waiting_reasons}. Whoever reads the trace wants to know."
            )


def line_of(plan: StepPlan) -> str:
    """Return a plan as a line of a script."""
    parts = [f"{row.request.request_id}[{row.start}:{row.end}]" for row in plan.rows]
    parts += [f"+{request.request_id}" for request in plan.admitted]
    parts += [f"^{request.request_id}" for request in plan.resumed]
    parts += [f"-{preemption.request.request_id}" for preemption in plan.preempted]
    return " ".join(parts)


def difference(plan: StepPlan, expected: str, scheduler: Any, waiting: Sequence[Request]) -> str:
    """Return what is wrong with a plan, the cause before its consequences.

    Args:
        expected: the line that the plan should give.
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


def _and(names: Sequence[str]) -> str:
    return ", ".join(names) or "nobody"
