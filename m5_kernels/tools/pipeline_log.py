"""Watches a pipelined engine: what each `step()` launches, and whose tokens it returns."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.table import Table

import m5_kernels
from m5_kernels import SamplingParams
from milestone_llm.cli import console
from milestone_llm.lab.demo import show
from milestone_llm.lab.demo.work import Work


def show_pipeline(work: Work, prompt: list[int]) -> None:
    """Two equal requests; the second is to stop at a token that the first says on its way."""
    engine = work.engine(m5_kernels, max_num_seqs=2, max_model_len=len(prompt) + 8, trace="memory")

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, **fields)

    tokens = engine.generate([prompt], params())[0].token_ids
    stop = next((token for token in tokens[1:5] if token != tokens[0]), tokens[0])
    engine.tracer.records.clear()
    engine.add_request(prompt, params())
    engine.add_request(prompt, params(stop_token_ids=[stop]))
    show.headline("The pipeline, call by call")
    console.print(f"r1 wants 6 tokens; r2 has the same prompt and stops at token {stop}.")
    print_calls(engine)
    console.print(
        "Eager: every call waits for its own tokens, and no row is wasted."
        if engine.config.enforce_eager
        else "Tokens come one call after their step was launched. By the time r2 is known to have "
        "stopped, its next row is on its way: it is padding, and what it computes is dropped. "
        "r1 ends by its length, which is known beforehand: no row too many."
    )


def print_calls(engine: Any) -> None:
    """Step until the engine is idle; a line a call.

    Record number n of the trace is of the step that call n launched.
    """
    calls = []
    while engine.has_unfinished_requests():
        calls.append(engine.step())
    table = Table(box=None, header_style="bold")
    table.add_column("call", justify="right")
    for name in ("launches a step of", "gets tokens", ""):
        table.add_column(name)
    for number, (outputs, record) in enumerate(zip_longest(calls, engine.tracer.records)):
        rows = record.batch if record else []
        launched = [
            row.request_id + (f" +{row.num_new_tokens}" if row.num_new_tokens > 1 else "")
            for row in rows
        ]
        tokens = [f"{output.request_id}: {output.token_ids[-1]}" for output in outputs]
        notes = [f"{output.request_id} finished" for output in outputs if output.finished]
        notes += [f"{r.request_id}'s row is wasted" for r in rows if r.phase == "padding"]
        cells = (", ".join(words) for words in (launched or ["-"], tokens or ["-"], notes))
        table.add_row(str(number), *cells)
    console.print(table)
