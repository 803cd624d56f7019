"""What does each call of step() launch, and whose tokens does it return?"""

from itertools import zip_longest
from typing import Any

from rich.table import Table

import m5_kernels
from m5_kernels import SamplingParams
from milestone_llm.command.cli import console

PROMPT = [5, 9, 33]


def make_engine() -> Any:
    """An engine whose steps are recorded."""
    return m5_kernels.LLMEngine("tiny-llama", device="cpu", max_model_len=64, trace="memory")


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


def main() -> None:
    """Two equal requests; the second is to stop at a token that both will say on their way."""
    endless = {"temperature": 0.0, "ignore_eos": True}
    told = make_engine().generate([PROMPT], SamplingParams(max_tokens=6, **endless))[0].token_ids
    engine = make_engine()
    engine.add_request(PROMPT, SamplingParams(max_tokens=6, **endless))
    engine.add_request(PROMPT, SamplingParams(max_tokens=6, stop_token_ids=[told[1]], **endless))
    print(f"r0 wants 6 tokens; r1 has the same prompt and stops at token {told[1]}.")
    print_calls(engine)


if __name__ == "__main__":
    main()
