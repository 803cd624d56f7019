"""What clients of M5 get at three rates, over HTTP and from the engine alone, on one GPU.

    python -m docs.questions.serving_online

512 prompts of 256..768 random tokens, 64..192 tokens out, Poisson arrivals, Qwen3-0.6B's shape with
random weights, 256 rows and 16,384 tokens a step. `serving_words` is the server, and
`milestone_llm.serving.bench` its client, in a process of its own; no prompt is sent twice.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import torch

from m5_kernels import LLMEngine, SamplingParams
from m5_kernels.tools.measure import gpu_command
from milestone_llm.lab.bench.measure import percentile

MODEL = "random-qwen3-0.6b"
LIMITS = {"max_model_len": 4096, "max_num_batched_tokens": 16384, "kv_cache_tokens": 340_000}
RATES = {"32": (32, 16), "128": (128, 4), "all at once": (51_200, 0.01)}
"""Requests a second, and for how many seconds."""


def main(_: argparse.Namespace) -> None:
    """Measure, and print both tables."""
    print(f"On one {torch.cuda.get_device_name()}, torch {torch.__version__}.\n")
    over_http, way = serve_and_measure()
    alone = {name: engine_alone(rate, seconds) for name, (rate, seconds) in RATES.items()}
    print("| requests a second | | tok/s | TTFT mean, P99 | TPOT mean | ITL mean, P99 (ms) |")
    print("|---|---|---|---|---|---|")
    for name in RATES:
        for what, figures in (("HTTP", over_http[name]), ("engine alone", alone[name])):
            print("| {} | {} | {:,.0f} | {:.0f}, {:.0f} | {:.2f} | {:.1f}, {:.1f} |".format(
                name, what, *figures
            ))  # fmt: skip
    print(f"\nThe way of a token, mean over all rates:\n\n{way}")


def serve_and_measure() -> tuple[dict[str, list[float]], str]:
    """Figures by rate, and what the server says at its end."""
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    command = ["docs.questions.serving_words", "--model", MODEL, *limits, "--port", "0"]
    measured = {}
    with (
        subprocess.Popen(
            [sys.executable, "-m", *command, "--disable-log-stats"],
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert server.stdout is not None
        url = next(
            found[1] for line in server.stdout if (found := re.search(r" at (http\S+)", line))
        )
        for seed, (name, (rate, seconds)) in enumerate(RATES.items()):
            path = Path(folder, f"{seed}.json")
            words = f"--url {url} --rate {rate} --seconds {seconds} --seed {seed} --json {path}"
            lens = "--input-len 256 768 --output-len 64 192"
            bench = f"-m milestone_llm.serving.bench {words} {lens}".split()
            subprocess.run([sys.executable, *bench], check=True, stdout=subprocess.DEVNULL)
            (point,) = json.loads(path.read_text())["points"]
            assert point["completed"] == 512, point
            names = "tok_s", "ttft_mean", "ttft_p99", "tpot_mean", "itl_mean", "itl_p99"
            measured[name] = [point[key] for key in names]
        server.terminate()
        return measured, "".join(line for line in server.stdout if " ms\n" in line)


def engine_alone(rate: float, seconds: float) -> list[float]:
    """The same kind of traffic at `LLMEngine.step`, in this process."""
    rng, due, work = Random(int(rate)), 0.0, []
    for _ in range(round(rate * seconds)):
        due += rng.expovariate(rate)
        prompt = rng.choices(range(1000, 150_000), k=rng.randint(256, 768))
        work.append((due, prompt, rng.randint(64, 192)))
    engine = LLMEngine(MODEL, **LIMITS)
    engine.warm_up()
    times: dict[str, list[float]] = defaultdict(list)
    arrival, num_tokens = {}, defaultdict(int)
    start = time.perf_counter()
    while work or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while work and work[0][0] <= now:
            due, prompt, max_tokens = work.pop(0)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            arrival[engine.add_request(prompt, params)] = due
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, work[0][0] - now))
        for output in engine.step():
            times[output.request_id].append(time.perf_counter() - start)
            num_tokens[output.request_id] = len(output.token_ids)
    wall = time.perf_counter() - start
    ttft = [1e3 * (times[name][0] - due) for name, due in arrival.items()]
    gaps = [1e3 * (b - a) for each in times.values() for a, b in pairwise(each)]
    tpot = [1e3 * (t[-1] - t[0]) / (num_tokens[name] - 1) for name, t in times.items()]
    del engine
    total = sum(num_tokens.values()) / wall
    return [
        total,
        fmean(ttft),
        percentile(ttft, 99),
        fmean(tpot),
        fmean(gaps),
        percentile(gaps, 99),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m docs.questions.serving_online")
    sys.exit(gpu_command(parser, main))
