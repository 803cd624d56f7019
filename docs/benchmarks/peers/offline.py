"""Let an engine do the work of the others: `python -m docs.benchmarks.peers.offline vllm FOLDER`

Prompts are random tokens, and others in each run, so that no prefix of an earlier run is found.
Outputs have a given length, and no engine makes text. FOLDER is a checkpoint, see `checkpoint`.
Engines run one after the other, each in a process of its own.

vLLM and nano-vllm must be installed. nano-vllm calls FlashAttention by the name `flash_attn`; if
there is no such package, it gets the FlashAttention 3 of vLLM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from milestone_llm.cli import ended_in_one_line, positive
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.workloads import nano

Generate = Callable[[list[list[int]], list[int], dict[str, Any]], object]
"""Makes outputs of the given lengths; the last argument has fields of `SamplingParams`."""


class Work(NamedTuple):
    """Requests of equal lengths, in tokens."""

    num_requests: int
    shared_len: int
    """Tokens with which all prompts begin."""
    own_len: int
    output_len: int
    sampling: dict[str, Any] | None = None


WORKS = {
    "single": Work(1, 0, 100, 512),
    "8": Work(8, 0, 100, 512),
    "32": Work(32, 0, 100, 512),
    "filters": Work(64, 0, 512, 256, {"top_k": 50, "top_p": 0.95}),
    "long": Work(8, 0, 32_000, 128),
    "shared": Work(512, 2048, 64, 64),
}


def requests_of(name: str, run: int) -> tuple[list[list[int]], list[int], dict[str, Any]]:
    """Return prompts, output lengths and sampling of a run. `nano` is nano-vllm's benchmark."""
    if name == "nano":
        items = nano(10_000)
        prompts = [[(token + 7919 * run) % 10_000 for token in item.prompt] for item in items]
        return prompts, [item.params.max_tokens for item in items], {}
    work, rng = WORKS[name], random.Random(100 * run + 7)
    shared = [rng.randrange(10_000) for _ in range(work.shared_len)]
    prompts = [
        shared + [rng.randrange(10_000) for _ in range(work.own_len)]
        for _ in range(work.num_requests)
    ]
    return prompts, [work.output_len] * work.num_requests, work.sampling or {}


def imported(name: str, package: str) -> ModuleType:
    """Return a module of another engine.

    Raises:
        InputError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"this needs {package}, which is not installed ({error})") from None


def m5(model: str, options: dict[str, Any]) -> Generate:
    """Return what this project's M5 generates with."""
    from m5_kernels import LLMEngine, SamplingParams

    engine = LLMEngine(model, **{"max_num_batched_tokens": 16_384, **options})
    engine.warm_up()
    return lambda prompts, lengths, sampling: engine.generate(
        prompts, [_params(SamplingParams, length, sampling) for length in lengths]
    )


def vllm(model: str, options: dict[str, Any]) -> Generate:
    """Return what vLLM generates with."""
    library = imported("vllm", "vLLM")
    console.print(f"vLLM {library.__version__}")
    engine = library.LLM(model, **options)
    engine.generate(["a"], library.SamplingParams(max_tokens=8), use_tqdm=False)

    def generate(prompts: list[list[int]], lengths: list[int], sampling: dict[str, Any]) -> object:
        tokens_only = {"detokenize": False, **sampling}
        params = [_params(library.SamplingParams, length, tokens_only) for length in lengths]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return engine.generate(given, params, use_tqdm=False)

    return generate


def nano_vllm(model: str, options: dict[str, Any]) -> Generate:
    """Return what nano-vllm generates with."""
    if importlib.util.find_spec("flash_attn") is None:
        sys.modules["flash_attn"] = _flash_attn_of_vllm()
    library = imported("nanovllm", "nano-vllm")
    engine = library.LLM(model, **options)
    engine.generate(["a"], library.SamplingParams(max_tokens=8), use_tqdm=False)

    def generate(prompts: list[list[int]], lengths: list[int], sampling: dict[str, Any]) -> object:
        params = [_params(library.SamplingParams, length, sampling) for length in lengths]
        return engine.generate(prompts, params, use_tqdm=False)

    return generate


ENGINES: dict[str, Callable[[str, dict[str, Any]], Generate]] = {
    "m5": m5,
    "vllm": vllm,
    "nano-vllm": nano_vllm,
}


def _params(kind: Any, length: int, more: dict[str, Any]) -> Any:
    return kind(temperature=0.6, ignore_eos=True, max_tokens=length, **more)


def _flash_attn_of_vllm() -> ModuleType:
    """Return a module `flash_attn` with the two functions that nano-vllm calls."""
    attend = imported("vllm.vllm_flash_attn", "flash-attn or vLLM").flash_attn_varlen_func

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if options.get("block_table") is not None:  # vLLM takes lengths, and no starts
            options["seqused_k"] = options.pop("cu_seqlens_k").diff()
        return attend(q, k, v, fa_version=3, **options)

    def flash_attn_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any, **options: Any
    ) -> Any:
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        most = block_table.shape[1] * k_cache.shape[1]
        out = attend(
            q.flatten(0, 1), k_cache, v_cache, cu_seqlens_q=starts, max_seqlen_q=1,
            seqused_k=cache_seqlens, max_seqlen_k=most, block_table=block_table,
            fa_version=3, **options,
        )  # fmt: skip
        return out[:, None]

    module = ModuleType("flash_attn")
    vars(module).update(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    return module


def measure(generate: Generate, name: str, num_runs: int) -> None:
    """Print the seconds and tokens a second of each run."""
    seconds = []
    for run in range(num_runs):
        prompts, lengths, sampling = requests_of(name, run)
        start = time.perf_counter()
        generate(prompts, lengths, sampling)
        seconds.append(time.perf_counter() - start)
    times = " ".join(f"{each:.2f}" for each in seconds)
    speeds = " ".join(f"{sum(lengths) / each:,.0f}" for each in seconds)
    text = f"{name:8}  {sum(lengths):,} tokens out  {times} s  {speeds} tok/s"
    console.print(text, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.benchmarks.peers.offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("engine", choices=ENGINES)
    add("model", metavar="FOLDER")
    add("--work", nargs="+", choices=["nano", *WORKS], default=["nano", "single"])
    add("--runs", type=positive, default=3, help="of each work, with other prompts")
    add("--options", type=json.loads, default={}, metavar="JSON", help="fields of the engine")
    args = parser.parse_args(arguments)

    def run() -> None:
        options = {"max_model_len": 4096, **args.options}
        generate = ENGINES[args.engine](args.model, options)
        console.print(f"{args.engine} on {machine()}\n{versions()}\n{args.model}, {options}\n")
        for name in args.work:
            measure(generate, name, args.runs)

    return ended_in_one_line(run)


if __name__ == "__main__":
    sys.exit(main())
