"""The same schedule, computed another way: `python -m m5_kernels.demo`

Three requests with M4 and with M5: the same steps and the same tokens. How M5's steps overlap shows
call by call in `python -m m5_kernels.walkthrough`.

Kernels run on a GPU, or under Triton's interpreter (slow: TRITON_INTERPRET=1 with --model
tiny-llama). On a CPU torch's own take their place, and a GGUF file's weights stay in the few bits
in which they are stored; the demo says which and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import m4_prefix_chunked
import m5_kernels
from milestone_llm.cli import positive
from milestone_llm.lab.demo.command import demo_parser, run_demo

from .tools.launch import SIZE_HELP, silence, start_ranks

PICTURE = "m5_timeline.png"


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = demo_parser("m5_kernels", __doc__)
    add = parser.add_argument
    add("--enforce-eager", action="store_true", help="no CUDA graphs, no pipelined steps")
    add("--no-m4", action="store_true", help="leave M4 out")
    add("--quantization", choices=["int8", "fp8", "gguf"], help="weights in few bits")
    add("--tensor-parallel-size", type=positive, default=1, metavar="N", help=SIZE_HELP)
    return parser


def demo(args: argparse.Namespace) -> None:
    """Serve the requests with M4 and with M5."""
    from milestone_llm.consoles import console
    from milestone_llm.lab.demo import show
    from milestone_llm.lab.demo.work import load_work
    from milestone_llm.models.checkpoint import find_gguf

    work = load_work(args)
    args.max_model_len = work.longest
    runs = [] if args.no_m4 else [work.run("M4", m4_prefix_chunked, trace=None, scheduler=None)]
    named = {} if args.quantization is None else {"model": args.model}  # read from its files
    runs.append(work.run("yours" if args.scheduler else "M5", m5_kernels, **named))
    engine = runs[-1].engine
    if not args.no_m4:
        console.print("M4: Hugging Face's modules, paged attention.")
    console.print(f"M5: {what_runs(engine)}.")
    show.steps(runs[-1])
    show.answers(runs[-1])
    show.requests(runs)
    show.summary(runs)
    if args.quantization is None and engine.model.device.type == "cpu" and find_gguf(args.model):
        options = {"model": args.model, "quantization": "gguf", "trace": None, "scheduler": None}
        runs.append(work.run("M5 in few bits", m5_kernels, **options))
        show.in_fewer_bits(runs)
        runs.pop()
    if engine.model.device.type == "cuda":  # by step both are the same
        show.timeline(runs, args.out / PICTURE, by="time")
    show.page(runs, args.explore)


def what_runs(engine: Any) -> str:
    """Which form of the kernels this engine uses, and why."""
    import torch

    from .kernels.triton_or_twin import INTERPRETED

    device, decoder, form = engine.model.device, engine.decoder, f"{engine.decoder.name}, "
    if not decoder.must_be_captured:
        family = engine.model.config.model_type
        form = f"there is no fused decoder for {family}: {decoder.name}, our attention; "
    if device.type == "cuda":
        has_graphs = decoder.can_be_captured and not engine.config.enforce_eager
        graphs = "with" if has_graphs else "without"
        return f"{form}Triton kernels on {torch.cuda.get_device_name(device)}, {graphs} CUDA graphs"
    if INTERPRETED:
        return f"{form}Triton kernels under the interpreter, since TRITON_INTERPRET=1 is set"
    if not decoder.must_be_captured:
        return f"{form}torch's attention, since there is no GPU"
    bits = {
        "gguf": ", weights in the file's own bits",
        "int8": ", weights in eight bits",
        "fp8": ", weights and activations in eight bits",
    }
    return f"{form}merged products and torch's kernels{bits.get(engine.config.quantization, '')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    args = parser().parse_args(arguments)
    start_ranks("m5_kernels.demo", args.tensor_parallel_size, arguments)
    silence(args)
    return run_demo(demo, args, [PICTURE], seconds=27)


if __name__ == "__main__":
    sys.exit(main())
