"""Three requests in one static batch: `python -m m1_single.demo`.

Watch the rows that read `padding`: the short request is long done, and its row is still computed
until the longest has its hundred tokens.
"""

from __future__ import annotations

import argparse

from . import LLMEngine, demo_kit


def demo(args: argparse.Namespace) -> None:
    """Serve the requests, then show text, telling steps, summary and timeline."""
    engine = LLMEngine(args.model, max_num_seqs=args.max_num_seqs, trace=args.trace)
    items = demo_kit.work_items(args, engine)
    is_chat = engine.tokenizer is not None and bool(engine.tokenizer.chat_template)
    outputs, records = demo_kit.serve_with_progress(engine, items, is_chat, "static batch")
    demo_kit.print_trace(records, "Static batching, step by step")
    demo_kit.print_answers(items, outputs)
    demo_kit.print_summary(records, outputs)
    demo_kit.write_timeline([records], ["static batching"], args.out / "m1_timeline.png")


if __name__ == "__main__":
    demo_kit.main_exit(demo, demo_kit.base_parser(__doc__ or ""))
