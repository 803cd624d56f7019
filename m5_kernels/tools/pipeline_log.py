"""Watches a pipelined engine: what each `step()` launched, and whose tokens it gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from milestone_llm.engine.plan import StepPlan
from milestone_llm.trace.records import StepRecord


@dataclass(frozen=True)
class Call:
    """One call of `step()`."""

    launched: list[str]
    """Requests in the step that it started, with the tokens of each where that is not one."""
    delivered: dict[str, int]
    """The token that each request got: from the step that the call before started."""
    finished: list[str]


def record_calls(engine: Any) -> list[Call]:
    """Step until the engine is idle; what each call did."""
    calls, plans = [], []
    launch = engine.runner.launch

    def watched(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = watched
    try:
        while engine.has_unfinished_requests():
            num_before = len(plans)
            outputs = engine.step()
            rows = [row for plan in plans[num_before:] for row in plan.rows]
            calls.append(
                Call(
                    [
                        row.request.request_id
                        + (f" +{row.num_new_tokens}" if row.num_new_tokens > 1 else "")
                        for row in rows
                    ],
                    {output.request_id: output.token_ids[-1] for output in outputs},
                    [output.request_id for output in outputs if output.finished],
                )
            )
    finally:
        del engine.runner.launch
    return calls


def print_calls(calls: list[Call], records: list[StepRecord], console: Console) -> None:
    """A line a call. A record belongs to the call that took its tokens in."""
    table = Table(box=None, header_style="bold")
    table.add_column("call", justify="right")
    table.add_column("launches a step of")
    table.add_column("gets the tokens of the step before")
    table.add_column("")
    padding = [
        {row.request_id for row in record.batch if row.phase == "padding"} for record in records
    ]
    for number, call in enumerate(calls):
        tokens = ", ".join(f"{name}: {token}" for name, token in call.delivered.items())
        notes = [f"{name} finished" for name in call.finished]
        if number < len(padding):  # record number n is of the step that call n launched
            notes += [f"the row of {name} will be wasted" for name in sorted(padding[number])]
        table.add_row(str(number), ", ".join(call.launched) or "-", tokens or "-", ", ".join(notes))
    console.print(table)
