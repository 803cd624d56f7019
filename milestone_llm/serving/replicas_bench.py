"""What do replicas find in their caches, and what do they cost?

1. Prompts that begin with one of some system prompts, in random order, to 2 and to 4 replicas by
   each of the router's policies, and to one engine with as much cache as all replicas together.
2. The same requests over HTTP to a server with one engine and to one with one replica: the
   difference is the way through Ray. The model is replaced by steps of --step-ms, so that a busy
   machine hardly matters.

Needs Ray: pip install -c constraints.txt -e ".[ray]"
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shlex
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.cli import (
    Formatter,
    add_options,
    at_least_0,
    console,
    log_console,
    positive,
    run_command,
)
from milestone_llm.core.sampling_params import SamplingParams

from .bench_report import machine
from .engine_client import EngineReport, EngineRequest
from .engine_spec import EngineSpec

if TYPE_CHECKING:
    from .desk import Desk
    from .open_loop import Outcome
    from .replicas import Replicas

MILESTONE, MODEL = "m4_prefix_chunked", "tiny-llama"
BLOCK_SIZE, SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 16, 128, (16, 48), 16
MAX_NUM_SEQS, MAX_MODEL_LEN = 8, 256
POLICIES = ("prefix", "round-robin", "random")
VOCABULARY = range(3, 150)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.serving.replicas_bench",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--replicas", type=positive, nargs="+", default=[2, 4], metavar="N", help="how many")
    add("--prompts", type=positive, default=400, metavar="N", help="for each policy")
    add("--systems", type=positive, default=64, metavar="N", help="system prompts")
    about = "tokens of each replica's cache"
    add("--cache-tokens", type=positive, default=4096, metavar="N", help=about)
    about = "of a step, where the way through Ray is measured"
    add("--step-ms", type=at_least_0, default=10.0, metavar="MS", help=about)
    add_options(parser, "seed")
    return run_command(measure, parser.parse_args(arguments))


def measure(args: argparse.Namespace) -> None:
    """Print both tables."""
    console.print(f"{machine()}\n")
    console.print(
        f"{args.prompts} prompts: one of {args.systems} system prompts of {SYSTEM_TOKENS} tokens,\n"
        f"{QUESTION_TOKENS[0]}..{QUESTION_TOKENS[1]} of its own, {OUTPUT_TOKENS} of output; "
        f"{args.cache_tokens:,} tokens of cache a replica\n"
    )
    console.print("                        prompt tokens   of one   most sent to a")
    console.print("replicas  policy           cached      engine's   replica / mean")
    for num_replicas in args.replicas:
        hits = one_engine(args, num_replicas)
        console.print(f"       1  {'all caches':13}{hits:10.1%}")
        for policy, (found, load) in by_policy(args, num_replicas).items():
            share = found / hits
            console.print(f"{num_replicas:8}  {policy:13}{found:10.1%}{share:14.1%}{load:14.2f}")
    console.print("\n                     first token, ms      tokens a second")
    console.print("server               p50       p95        of 16 streams")
    for name, options in (("one engine", []), ("one replica", ["--replicas", "1"])):
        p50, p95, rate = over_http(args, options)
        console.print(f"{name:16}{p50:8.1f}{p95:10.1f}{rate:21,.0f}")


# --- what is found --------------------------------------------------------------------------------


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """System prompts by Zipf's law, each with a question of its own."""
    draw = random.Random(args.seed)
    systems = [draw.choices(VOCABULARY, k=SYSTEM_TOKENS) for _ in range(args.systems)]
    weights = [1 / (place + 1) for place in range(args.systems)]
    return [
        system + draw.choices(VOCABULARY, k=draw.randint(*QUESTION_TOKENS))
        for system in draw.choices(systems, weights, k=args.prompts)
    ]


def spec(cache_tokens: int) -> EngineSpec:
    """The engine of all tables."""
    fields = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "kv_cache_tokens": cache_tokens,
        "device": "cpu",
    }
    return EngineSpec(MILESTONE, MODEL, fields, num_threads=1)


def one_engine(args: argparse.Namespace, num_caches: int) -> float:
    """The share of prompt tokens that one engine with so many caches finds."""
    engine = spec(num_caches * args.cache_tokens).build()
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    engine.generate(prompts(args), params)
    cache = engine.stats()["prefix_cache"]
    return float(cache["saved_tokens"] / cache["queried_tokens"])


def by_policy(args: argparse.Namespace, num_replicas: int) -> dict[str, tuple[float, float]]:
    """By policy: the share of prompt tokens found, and the largest load, of the mean one.

    The load is prompt and output tokens that were sent to a replica.
    """
    from .desk import Desk
    from .metrics import Metrics
    from .replicas import Replicas

    async def run_all() -> dict[str, tuple[float, float]]:
        desk.event_loop = asyncio.get_running_loop()
        figures = {}
        for policy in POLICIES:
            replicas.policy = policy
            before = await _reports(replicas)
            await _ask_all(desk, prompts(args), policy)
            after = await _reports(replicas)
            figures[policy] = _found_and_load(before, after)
        return figures

    log_console.print(f"starting {num_replicas} replicas")
    with Replicas(spec(args.cache_tokens), num_replicas) as replicas:
        desk = Desk(replicas, Metrics(MODEL), args.prompts)
        running = threading.Thread(target=replicas.run, args=(desk.deliver,))
        running.start()
        try:
            return asyncio.run(run_all())
        finally:
            replicas.stop()
            running.join()


async def _reports(replicas: Replicas) -> dict[str, EngineReport]:
    reports = await asyncio.wrap_future(replicas.report())
    return {each.replica: each for each in reports}


async def _ask_all(desk: Desk, all_prompts: list[list[int]], policy: str) -> None:
    """Ask in order, as many at a time as all replicas have rows. Policies share nothing."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, cache_salt=policy)
    queue = iter(enumerate(all_prompts))

    async def ask_on() -> None:
        for number, prompt in queue:
            call = desk.open_call(1)
            try:
                call.submit([EngineRequest(f"{policy}-{number}", prompt, params)], None)
                while await call.pieces():
                    pass
            finally:
                call.close()

    await asyncio.gather(*(ask_on() for _ in range(desk.engine.info.max_num_seqs)))


def _found_and_load(
    before: dict[str, EngineReport], after: dict[str, EngineReport]
) -> tuple[float, float]:
    found, queried, loads = 0, 0, []
    for name, report in after.items():
        then = before[name]
        cache, cache_then = report.stats["prefix_cache"], then.stats["prefix_cache"]
        found += cache["saved_tokens"] - cache_then["saved_tokens"]
        queried += cache["queried_tokens"] - cache_then["queried_tokens"]
        now, past = report.metrics, then.metrics
        load = now.num_prompt_tokens + now.num_generation_tokens
        loads.append(load - past.num_prompt_tokens - past.num_generation_tokens)
    return found / queried, max(loads) / statistics.mean(loads)


# --- what it costs --------------------------------------------------------------------------------


def over_http(args: argparse.Namespace, options: Sequence[str]) -> tuple[float, float, float]:
    """Time to first token of requests one at a time, p50 and p95 in ms; tokens/s of 16 at once."""
    from milestone_llm.lab.bench.measure import percentile

    from .open_loop import send_all

    def ask(num_requests: int, num_tokens: int, seed: int) -> list[Outcome]:
        draw = random.Random(seed)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        items = [WorkItem(draw.choices(VOCABULARY, k=16), params) for _ in range(num_requests)]
        return asyncio.run(send_all(url, items))

    with _server(args, options) as url:
        ask(4, 4, seed=0)  # for connections and caches to be there
        firsts = [1e3 * ask(1, 1, seed)[0].end for seed in range(1, 41)]
        rates = []
        for seed in range(3):
            outcomes = ask(16, 100, 100 + seed)
            seconds = max(each.end for each in outcomes)
            rates.append(sum(each.num_tokens for each in outcomes) / seconds)
    return percentile(firsts, 50), percentile(firsts, 95), statistics.median(rates)


@contextmanager
def _server(args: argparse.Namespace, options: Sequence[str]) -> Iterator[str]:
    words = [MILESTONE, "--step-ms", f"{args.step_ms:g}", "--model", MODEL, "--port", "0"]
    words += ["--max-num-seqs", "16", "--max-model-len", "256", "--threads", "1", *options]
    command = [sys.executable, "-m", "milestone_llm.serving.timed", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if said := re.search(r" at (http://\S+)\n", line):
                    yield said[1]
                    return
            raise ValueError(f"the server did not start: {shlex.join(command)}")
        finally:
            process.terminate()
            process.stdout.read()  # what it says until it ends must go somewhere


if __name__ == "__main__":
    sys.exit(main())
