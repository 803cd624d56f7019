"""Measure a server with vLLM's client: `python -m docs.benchmarks.peers.online m5 FOLDER`

Starts the server of M5 or of vLLM, sends it 512 requests at each rate with `vllm bench serve`, and
ends it. A request has some 512 random tokens in and 128 out. vLLM must be installed in both cases,
for its client. FOLDER is a checkpoint, see `checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milestone_llm.cli import ended_in_one_line, positive
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.record import machine, versions

from .offline import imported

ADDRESS = "http://127.0.0.1:8001"
LIMITS = [
    "--port", "8001", "--max-num-seqs", "256", "--max-model-len", "4096",
    "--max-num-batched-tokens", "16384",
]  # fmt: skip
SERVERS = {
    "m5": ["m5_kernels.serve", *LIMITS, "--max-queued", "4096"],
    "vllm": ["vllm.entrypoints.openai.api_server", *LIMITS],
}
START_SECONDS = 300


@contextmanager
def server(engine: str, model: str) -> Iterator[tuple[str, float]]:
    """Start a server. Yield the name of its model and the seconds until it was ready."""
    start = time.perf_counter()
    command = [sys.executable, "-m", *SERVERS[engine], "--model", model]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while (name := _model_name()) is None:
                if process.poll() is not None or time.perf_counter() - start > START_SECONDS:
                    raise InputError(f"the server of {engine} was not ready")
                time.sleep(0.5)
            yield name, time.perf_counter() - start
        finally:
            process.terminate()


def _model_name() -> str | None:
    try:
        with urllib.request.urlopen(f"{ADDRESS}/v1/models", timeout=1) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, OSError):
        return None


def bench(model: str, name: str, rate: str, num_prompts: int, seed: int) -> dict[str, Any]:
    """Return what vLLM's client measured at a rate."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
            "--backend", "openai", "--endpoint", "/v1/completions", "--base-url", ADDRESS,
            "--model", model, "--served-model-name", name,
            "--dataset-name", "random", "--random-input-len", "512", "--random-output-len", "128",
            "--random-range-ratio", "0.5", "--num-prompts", str(num_prompts), "--ignore-eos",
            "--request-rate", rate, "--seed", str(seed),
            "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99",
            "--save-result", "--result-dir", folder, "--result-filename", "result.json",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_bytes())
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.benchmarks.peers.online",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("engine", choices=SERVERS)
    add("model", metavar="FOLDER")
    add("--rates", nargs="+", default=["32", "128", "inf"], help="requests a second")
    add("--num-prompts", type=positive, default=512)
    add("--new-prompts", action="store_true", help="other prompts at each rate (default: the same)")
    args = parser.parse_args(arguments)

    def run() -> None:
        imported("vllm", "vLLM")  # its client
        with server(args.engine, args.model) as (name, seconds):
            console.print(
                f"{args.engine} on {machine()}\n{versions()}\nready after {seconds:.0f} s"
            )
            for place, rate in enumerate(args.rates):
                seed = 7 + place * args.new_prompts
                found = bench(args.model, name, rate, args.num_prompts, seed)
                console.print(
                    f"{rate:>4} a second: {found['completed']} answers, "
                    f"{found['output_throughput']:,.0f} tok/s; mean, P99 in ms: "
                    f"TTFT {found['mean_ttft_ms']:,.1f}, {found['p99_ttft_ms']:,.1f}; "
                    f"TPOT {found['mean_tpot_ms']:.2f}, {found['p99_tpot_ms']:.2f}; "
                    f"ITL P99 {found['p99_itl_ms']:.1f}"
                )

    return ended_in_one_line(run)


if __name__ == "__main__":
    sys.exit(main())
