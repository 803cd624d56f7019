"""Three requests in one static batch: `python -m m1_single.demo`

Watch the rows that read `padding`: the short request is long done, and its row is still computed
until the longest has its hundred tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from milestone_llm.cli import run_command
from milestone_llm.demo import kit as demo_kit

from . import LLMEngine


def demo(args: argparse.Namespace) -> None:
    """Serve the requests; show the telling steps, the text, a summary and the timeline."""
    engine = LLMEngine(args.model, max_num_seqs=args.max_num_seqs, trace=args.trace)
    items = demo_kit.work_items(args, engine.tokenizer, engine.vocab_size)
    is_chat = demo_kit.is_chat_model(engine.tokenizer)
    run = demo_kit.serve_with_progress(engine, items, is_chat, "Static batching")
    demo_kit.print_trace(run, engine)
    demo_kit.print_answers(items, run.outputs)
    demo_kit.print_requests([run])
    demo_kit.print_summary([run])
    demo_kit.write_timeline([run], args.out / "m1_timeline.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = demo_kit.base_parser("m1_single", __doc__)
    return run_command(demo, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
