"""What does each milestone gain on a CPU? `python -m docs.questions.ladder_cpu`

M1 to M4 take turns with the same work, on the same model and the same KV memory: prompts with a
common beginning, outputs of different lengths. M1 and M2 reserve `max_model_len` tokens for each
request, so their memory holds few rows; M3 and M4 take blocks as they need them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from milestone_llm.cli import positive
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.command import bench_command
from milestone_llm.lab.bench.report import Tables
from milestone_llm.lab.bench.workloads import WorkItem, exactly
from milestone_llm.lab.explorer.positions import Positions

if TYPE_CHECKING:
    from milestone_llm.frontend.outputs import RequestOutput
    from milestone_llm.lab.bench.compare import Bench
    from milestone_llm.trace.records import StepRecord

TABLES: Tables = {
    "The same work in four engines, times in ms{of_rounds}": {
        "seconds": "{seconds:,.1f}",
        "tok/s": "{tok_s:,.1f}",
        "min..max": "{tok_s_min:,.1f}..{tok_s_max:,.1f}",
        "steps": "{num_steps:,.0f}",
        "most\nrows": "{most_rows:.0f}",
        "positions": "{positions:,.0f}",
        "mean\nlatency": "{latency_mean:,.0f}",
        "TTFT\np50": "{ttft_p50:,.0f}",
        "TPOT\np50": "{tpot_p50:,.0f}",
    }
}


def ladder(bench: Bench) -> None:
    """Compare the four engines."""
    args = bench.args
    if args.baseline:
        raise InputError("--baseline goes with the benches of the milestones")
    rng = random.Random(args.seed)
    tokens = partial(rng.choices, range(bench.loaded.vocab_size))
    beginning = tokens(k=args.common_tokens)
    items = [
        WorkItem(beginning + tokens(k=rng.randint(16, 64)), exactly(rng.randint(16, 96)))
        for _ in range(args.num_requests)
    ]
    num_regions = args.kv_cache_tokens // args.max_model_len
    rows_of = {"m1_single": num_regions, "m2_batching": num_regions}
    engines = {
        name: bench.engine(
            items,
            name,
            max_num_seqs=rows_of.get(name, len(items)),
            kv_cache_tokens=args.kv_cache_tokens,
        )
        for name in ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked")
    }
    about = {
        "prompts": f"{args.common_tokens} tokens that all begin with, and 16..64 of their own",
        "memory": f"{args.kv_cache_tokens:,} tokens of KV: {num_regions} regions of "
        f"max_model_len={args.max_model_len} in M1 and M2, blocks of 16 in M3 and M4",
        "TPOT": "M1 computes prompts before its batch decodes; from M2 on newcomers' prompts are "
        "computed between two tokens of the others",
    }
    title = f"ladder, {len(items)} requests"
    bench.compare(title, items, engines, tables=TABLES, facts=facts, about=about)


def facts(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> dict[str, float]:
    """Return what a run computed, and in how many rows."""
    positions = Positions()
    for record in records:
        positions.take(record)
    most_rows = max(len(record.batch) for record in records)
    return {"num_steps": len(records), "most_rows": most_rows, "positions": positions.computed}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options for sizes of the work and of the memory."""
    parser.set_defaults(num_requests=24, max_model_len=1024, rounds=3)
    add = parser.add_argument_group("ladder").add_argument
    add("--common-tokens", type=positive, default=96, help="what all prompts begin with")
    add("--kv-cache-tokens", type=positive, default=4096, metavar="N", help="of each engine")


PROGRAM = "docs.questions.ladder_cpu"
main = partial(
    bench_command, "m4_prefix_chunked", __doc__, run=ladder, prog=PROGRAM, options=options
)

if __name__ == "__main__":
    sys.exit(main())
