"""Compare how fast programs run a small model on a CPU: `python -m docs.benchmarks.cpu`

Hugging Face, llama.cpp and the five milestones run SmolLM2-135M from the same GGUF file: one
request, eight at a time, and prompts alone. All take turns in each round, so that other work on the
machine slows all of them. Only llama.cpp and `quantization="gguf"` compute with the file's own
bits; others have its numbers in float32, bfloat16 or in eight bits.

llama.cpp takes part if `llama-cpp-python` is installed: `pip install llama-cpp-python` builds it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from milestone_llm.cli import positive
from milestone_llm.consoles import console, log_console
from milestone_llm.lab.bench.hf_baselines import hf_continuous, hf_static
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.bench.workloads import WorkItem, random_tokens
from milestone_llm.models.checkpoint import load_model
from milestone_llm.models.gguf_cache import packaged_gguf

MODEL = "smollm2-135m"
WORK = {
    "1 request": (1, 64, 64),
    "8 requests": (8, 64, 64),
    "256 in": (1, 256, 1),
    "1,024 in": (1, 1024, 1),
}
"""Requests, tokens in, tokens out."""
ENGINES = {
    "M1": ("m1_single", {}),
    "M2": ("m2_batching", {}),
    "M3": ("m3_paged", {}),
    "M4": ("m4_prefix_chunked", {}),
    "M5": ("m5_kernels", {}),
    "M5, bfloat16": ("m5_kernels", {"dtype": "bfloat16"}),
    "M5, eight bits": ("m5_kernels", {"quantization": "int8"}),
    "M5, the file's bits": ("m5_kernels", {"quantization": "gguf"}),
}
Items = Sequence[WorkItem]
Runs = Callable[[Items], object]


def contestants(names: Sequence[str] | None, threads: int) -> dict[str, Runs]:
    """Load the contestants, and return a function for each by name. Nothing is timed before."""
    runs: dict[str, Runs] = {}

    def wanted(name: str) -> bool:
        is_wanted = names is None or name in names
        if is_wanted:
            log_console.print(f"loading {name}", style="dim")
        return is_wanted

    hf = load_model(MODEL, device="cpu").model
    limits = {"max_num_seqs": 8, "max_model_len": 1536, "max_num_batched_tokens": 2048}
    if wanted("HF one by one"):
        runs["HF one by one"] = lambda items: hf_static(hf, 1, items, ignored)
    if wanted("HF batch"):
        runs["HF batch"] = lambda items: hf_static(hf, 8, items, ignored)
    if wanted("HF continuous"):
        m2 = importlib.import_module("m2_batching").LLMEngine(hf, **limits)
        runs["HF continuous"] = lambda items: hf_continuous(m2, items, ignored)
    for name, (package, options) in ENGINES.items():
        if wanted(name):
            engine = importlib.import_module(package).LLMEngine
            runs[name] = partial(generate, engine(MODEL, device="cpu", **limits, **options))
    if importlib.util.find_spec("llama_cpp") is None:
        log_console.print("llama.cpp is not here: pip install llama-cpp-python", style="dim")
    elif wanted("llama.cpp"):
        runs["llama.cpp"] = LlamaCpp(str(packaged_gguf()[0]), threads)
    return runs


def ignored(num_tokens: int) -> None:
    """Ignore progress."""


def generate(engine: Any, items: Items) -> None:
    """Serve all requests at once."""
    engine.generate([item.prompt for item in items], [item.params for item in items])
    if hasattr(engine, "reset_prefix_cache"):
        engine.reset_prefix_cache()


@functools.cache  # the callback must stay
def silence() -> object:
    """Keep llama.cpp from logging."""
    import llama_cpp

    callback = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p())
    return callback


class LlamaCpp:
    """Greedy generation by llama.cpp, all requests in one batch, through its C interface."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        self.threads = threads
        silence()
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    @contextlib.contextmanager
    def _context(self, num_seqs: int, num_tokens: int, num_prompt: int) -> Iterator[Any]:
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_tokens, num_seqs
        params.n_batch, params.n_ubatch = max(512, num_prompt), 512
        params.n_threads = params.n_threads_batch = self.threads
        context = self.lib.llama_init_from_model(self.model, params)
        batch = self.lib.llama_batch_init(num_prompt, 0, 1)
        yield context, batch
        self.lib.llama_batch_free(batch)
        self.lib.llama_free(context)

    def __call__(self, items: Items) -> list[list[int]]:
        """Return the token ids of each request."""
        total = sum(len(item.prompt) + item.params.max_tokens for item in items)
        prompts = [item.prompt for item in items]
        with self._context(len(items), total + 64, sum(map(len, prompts))) as (context, batch):
            ends, place = [], 0
            for seq, prompt in enumerate(prompts):
                for position, token in enumerate(prompt):
                    self._put(batch, place, token, position, seq, position == len(prompt) - 1)
                    place += 1
                ends.append(place - 1)
            outputs = [[token] for token in self._decode(context, batch, place, ends)]
            for _ in range(items[0].params.max_tokens - 1):
                for seq, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                    end = len(prompt) + len(output) - 1
                    self._put(batch, seq, output[-1], end, seq, True)
                tokens = self._decode(context, batch, len(items), range(len(items)))
                for output, token in zip(outputs, tokens, strict=True):
                    output.append(token)
        return outputs

    @staticmethod
    def _put(batch: Any, place: int, token: int, position: int, seq: int, wanted: bool) -> None:
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, seq
        batch.logits[place] = wanted

    def log_probabilities(self, prompt: list[int]) -> list[float]:
        """Return those of the tokens of a prompt but the first, each after those before it."""
        with self._context(1, len(prompt), len(prompt)) as (context, batch):
            for position, token in enumerate(prompt):
                self._put(batch, position, token, position, 0, True)
            logits = torch.stack(self._logits(context, batch, len(prompt), range(len(prompt) - 1)))
            wanted = torch.tensor(prompt[1:])[:, None]
            return logits.log_softmax(-1).gather(1, wanted).flatten().tolist()

    def _decode(self, context: Any, batch: Any, size: int, places: Sequence[int]) -> list[int]:
        return [int(logits.argmax()) for logits in self._logits(context, batch, size, places)]

    def _logits(
        self, context: Any, batch: Any, size: int, places: Sequence[int]
    ) -> list[torch.Tensor]:
        batch.n_tokens = size
        if self.lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama.cpp could not compute a batch")
        row = ctypes.c_float * self.vocab_size
        addresses = [
            ctypes.addressof(self.lib.llama_get_logits_ith(context, place).contents)
            for place in places
        ]
        return [torch.frombuffer(row.from_address(at), dtype=torch.float32) for at in addresses]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table for each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=None, help="default: torch's")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of those who take part")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    threads = torch.get_num_threads()
    runs = contestants(args.only, threads)
    console.print(f"{MODEL} from one GGUF file, {threads} threads; {machine()}; {versions()}")
    console.print(f"tokens a second, medians of {args.rounds} rounds in turns (slowest..fastest)")
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    for kind in args.work:
        num_requests, num_in, num_out = WORK[kind]
        num_tokens = num_requests * (num_out if num_out > 1 else num_in)
        for round_ in range(args.rounds + 1):
            for name, run in runs.items():
                lengths = {"input_len": (num_in, num_in), "output_len": (num_out, num_out)}
                items = random_tokens(num_requests, **lengths, vocab_size=40_000, seed=round_)
                start = time.perf_counter()
                run(items)
                if round_:  # round 0 is a warm-up
                    rate = num_tokens / (time.perf_counter() - start)
                    rates[name].setdefault(kind, []).append(rate)

    def cell(rates: list[float]) -> str:
        return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}..{max(rates):,.0f})"

    rows = [[name, *map(cell, own.values())] for name, own in rates.items()]
    console.print(table("", ["", *args.work], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
