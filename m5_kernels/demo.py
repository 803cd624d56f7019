"""The same schedule, computed another way: `python -m m5_kernels.demo`

1. Three requests with M4 and with M5: the same steps and the same tokens.
2. The pipeline, call by call: each step() launches a step before the tokens of the last are known,
   so outputs come one call late, and a request that turns out to have stopped has one row too many.

Kernels run on a GPU, under Triton's interpreter (slow: TRITON_INTERPRET=1 with --model tiny-llama),
or as their torch twins on any CPU; the demo says which and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

import m4_prefix_chunked
from m5_kernels.kernels.backend import HAS_TRITON, INTERPRETED
from m5_kernels.tools.pipeline_log import Call, print_calls, record_calls
from milestone_llm.bench.workloads import WorkItem
from milestone_llm.cli import console, run_command
from milestone_llm.demo import kit as demo_kit
from milestone_llm.engine.inputs import encode_prompt
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.models.checkpoint import LoadedModel, load_model, max_position
from milestone_llm.trace.tracer import Tracer

from .engine import LLMEngine


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = demo_kit.base_parser("m5_kernels", __doc__)
    add = parser.add_argument
    add("--enforce-eager", action="store_true", help="no CUDA graphs, no pipelined steps")
    add("--no-m4", action="store_true", help="leave M4 out")
    return parser


def what_runs(engine: LLMEngine) -> str:
    """Which form of the kernels this engine uses, and why."""
    device = engine.model.device
    if engine.decoder is None:
        family = engine.model.config.model_type
        form = f"there is no fused decoder for {family}: Hugging Face's modules, our attention; "
    else:
        form = ""
    if device.type == "cuda":
        graphs = "without" if engine.config.enforce_eager else "with"
        return f"{form}Triton kernels on {torch.cuda.get_device_name(device)}, {graphs} CUDA graphs"
    if INTERPRETED:
        return f"{form}Triton kernels under the interpreter, since TRITON_INTERPRET=1 is set"
    why = "there is no GPU" if HAS_TRITON else "triton is not installed"
    return f"{form}torch twins of the kernels on {device.type}, since {why}"


def demo(args: argparse.Namespace) -> None:
    """Serve the requests with M4 and M5, then show the pipeline."""
    loaded = load_model(args.model)
    vocab_size = loaded.model.config.get_text_config().vocab_size
    items = demo_kit.work_items(args, loaded.tokenizer, vocab_size)
    is_chat = demo_kit.is_chat_model(loaded.tokenizer)
    limits = {"max_num_seqs": args.max_num_seqs, "max_model_len": longest(items, loaded, is_chat)}
    runs = []
    if not args.no_m4:
        before = m4_prefix_chunked.LLMEngine(loaded.model, tokenizer=loaded.tokenizer, **limits)
        runs.append(demo_kit.serve_with_progress(before, items, is_chat, "M4"))
    engine = LLMEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        enforce_eager=args.enforce_eager,
        trace=args.trace,
        **limits,
    )
    console.print(f"M5: {what_runs(engine)}.", soft_wrap=False)
    run = demo_kit.serve_with_progress(engine, items, is_chat, "M5")
    runs.append(run)
    demo_kit.print_trace(run, engine)
    demo_kit.print_answers(items, run.outputs)
    demo_kit.print_requests(runs)
    demo_kit.print_summary(runs)
    print_remarks(runs, engine)
    show_pipeline(args, loaded, run.outputs[0].prompt_token_ids)
    demo_kit.write_timeline(runs, args.out / "m5_timeline.png")


def longest(items: Sequence[WorkItem], loaded: LoadedModel, is_chat: bool) -> int:
    """Tokens of the longest request, and at least what the pipeline's part needs."""
    lengths = [len(encode_prompt(loaded.tokenizer, item.prompt, is_chat)) for item in items]
    most = max(
        lengths[0] + 8,
        *(length + item.params.max_tokens for length, item in zip(lengths, items, strict=True)),
    )
    return min(most, max_position(loaded.model) or most)


def print_remarks(runs: Sequence[demo_kit.DemoRun], engine: LLMEngine) -> None:
    """Whether the tokens agree, and why a CPU shows no speed."""
    console.print()
    if len(runs) > 1:
        same = [[out.token_ids for out in run.outputs] for run in runs]
        if same[0] == same[1]:
            console.print("M4 and M5 gave the same tokens.")
        else:
            console.print("M4 and M5 differ: sums in another order round to another token.")
    if engine.model.device.type == "cpu":
        console.print(
            "Times on a CPU say nothing here: the twins are written to be read. For speed, "
            "python -m m5_kernels.bench on a GPU."
        )


def show_pipeline(args: argparse.Namespace, loaded: LoadedModel, prompt: list[int]) -> list[Call]:
    """Two equal requests; the second is to stop at a token that the first says on its way."""
    params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    engine = LLMEngine(
        loaded.model,
        max_num_seqs=2,
        max_model_len=len(prompt) + 8,
        enforce_eager=args.enforce_eager,
    )
    tokens = engine.generate([prompt], SamplingParams(max_tokens=6, **params))[0].token_ids
    stop = next((t for t in tokens[1:5] if tokens.index(t) >= 1), tokens[0])
    engine.tracer = Tracer()
    engine.add_request(prompt, SamplingParams(max_tokens=6, **params))
    engine.add_request(prompt, SamplingParams(max_tokens=6, stop_token_ids=[stop], **params))
    if not hasattr(engine.runner, "launch"):
        return []
    calls = record_calls(engine)
    console.print()
    console.rule("[bold]The pipeline, call by call", align="left", style="dim")
    console.print(f"r1 wants 6 tokens; r2 has the same prompt and stops at token {stop}.")
    print_calls(calls, engine.tracer.records, console)
    if engine.config.enforce_eager:
        console.print("Eager: every call waits for its own tokens, and no row is wasted.")
    else:
        console.print(
            "Tokens come one call after their step was launched. By the time r2 is known to have "
            "stopped, its next row is on its way: it is padding, and what it computes is dropped. "
            "r1 ends by its length, which is known beforehand: no row too many."
        )
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(demo, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
