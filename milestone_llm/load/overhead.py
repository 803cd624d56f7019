"""What HTTP costs: the same requests by `generate`, over HTTP, and over HTTP as streams.

For `milestone_llm.serving.bench --overhead`. Ways take turns, and medians of rounds count. CPU time
is that of the process with the engine (for `generate`, this one), and beside it that of HTTP's: on
a busy machine it says more than the clock. At last the server is full, and refusals are timed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from milestone_llm.command.cli import model_libraries
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.lab.bench.measure import percentile
from milestone_llm.lab.bench.workloads import WORKLOADS, WorkItem, random_tokens
from milestone_llm.serving.command import serve_parser, spec_of
from milestone_llm.serving.timed import replace_runner

from .open_loop import TOKEN_IDS, body_of, open_request
from .server import RunningServer, door_of, running_server

NUM_REFUSALS = 500
WAYS = ("generate", "whole", "stream")


@dataclass(frozen=True)
class Times:
    """Seconds by the clock, and of CPU time, which other programs do not lengthen."""

    wall: float
    cpu: float
    """Of the process with the engine."""
    http: float = 0.0
    """Of the one in front of it, if there is one."""


def workload(args: argparse.Namespace) -> list[WorkItem]:
    """The requests that `--overhead` asks for.

    Raises:
        InputError: there is no such workload.
    """
    if args.overhead in WORKLOADS:
        return WORKLOADS[args.overhead](vocab_size=TOKEN_IDS)
    if not args.overhead.isdecimal() or not int(args.overhead):
        known = " or ".join(WORKLOADS)
        raise InputError(f"--overhead takes a number from 1 on, {known}; got {args.overhead!r}")
    lengths = args.input_len, args.output_len
    return random_tokens(int(args.overhead), *lengths, vocab_size=TOKEN_IDS, seed=args.seed)


def overhead_of(
    milestone: str, args: argparse.Namespace, items: Sequence[WorkItem]
) -> dict[str, Any]:
    """All figures of a milestone's engine and server, on requests that come at one time.

    Raises:
        InputError: the server does not start, or refuses a request.
    """
    config = importlib.import_module(milestone).EngineConfig
    options = ["--max-num-seqs", str(len(items)), "--max-queued", "1", *args.server]
    if hasattr(config, "enable_prefix_caching"):  # all rounds have the same prompts
        options = ["--no-enable-prefix-caching", *options]
    prepare = None
    if args.step_ms is not None:
        prepare = partial(replace_runner, step_ms=args.step_ms, token_ms=args.token_ms)
    parsed = serve_parser(milestone, None, config).parse_args(options)
    spec = spec_of(milestone, parsed, prepare)
    door = door_of(milestone, args.step_ms, args.token_ms)
    rounds = []
    with model_libraries(spec.num_threads):
        engine = spec.build()
    with running_server([*door, *options]) as server:
        for _ in range(args.rounds + 1):
            whole, _ = _served(server, items, is_stream=False)
            stream, num_events = _served(server, items, is_stream=True)
            rounds.append(dict(zip(WAYS, (_generated(engine, items), whole, stream), strict=True)))
        refusals = asyncio.run(_refusals(server.url, parsed.max_num_seqs + parsed.max_queued))
    num_tokens = sum(item.params.max_tokens for item in items)
    return {
        **_figures(rounds[1:], num_tokens),  # the first is for caches to fill
        "tokens_per_event": round(num_tokens / max(1, num_events), 2),
        **refusals,
    }


def _figures(rounds: Sequence[dict[str, Times]], num_tokens: int) -> dict[str, Any]:
    """Medians over the rounds, by way."""

    def each(figure: Callable[[Times, Times], float], ways: Sequence[str] = WAYS) -> dict[str, Any]:
        """A figure of each way, made of its times and those of `generate` in the same round."""
        values = {way: [figure(times[way], times["generate"]) for times in rounds] for way in ways}
        return {way: round(statistics.median(own), 3) for way, own in values.items()}

    ms = 1e3 / num_tokens
    return {
        "tokens_per_second": each(lambda own, _: num_tokens / own.wall),
        "seconds": {way: [round(times[way].wall, 3) for times in rounds] for way in WAYS},
        "share_of_generate": each(lambda own, other: other.wall / own.wall, WAYS[1:]),
        "cpu_ms_per_token": each(lambda own, _: ms * own.cpu),
        "http_cpu_ms_per_token": each(lambda own, _: ms * own.http, WAYS[1:]),
    }


def _generated(engine: BaseEngine, items: Sequence[WorkItem]) -> Times:
    """How long `generate` takes for all."""
    start, cpu = time.perf_counter(), time.process_time()
    engine.generate([item.prompt for item in items], [item.params for item in items])
    return Times(time.perf_counter() - start, time.process_time() - cpu)


def _served(server: RunningServer, items: Sequence[WorkItem], is_stream: bool) -> tuple[Times, int]:
    """How long a server takes for all, and in how many events it sent them."""
    bodies = [{**body_of(item), "stream": is_stream} for item in items]

    async def post_all() -> list[bytes]:
        return await asyncio.gather(*(_post(server.url, body) for body in bodies))

    start, before = time.perf_counter(), server.cpu_seconds()
    answers = asyncio.run(post_all())
    wall, after = time.perf_counter() - start, server.cpu_seconds()
    http, cpu = (now - then for now, then in zip(after, before, strict=True))
    for answer in answers:
        if b" 200 " not in answer[:20]:
            raise InputError(f"the server refuses a request: {answer.decode()[-500:]}")
    return Times(wall, cpu, http), sum(answer.count(b"data: {") for answer in answers)


async def _post(url: str, body: dict[str, Any]) -> bytes:
    """An answer as it comes: a client that costs next to nothing."""
    reader, writer = await open_request(url, body)
    answer = await reader.read()
    writer.close()
    return answer


async def _refusals(url: str, num_inside: int) -> dict[str, Any]:
    """How fast 429 is said, one connection after the other, while nobody else is let in."""
    body = {"prompt": [3], "max_tokens": 2**20, "ignore_eos": True, "stream": True}
    inside = [await open_request(url, body) for _ in range(num_inside)]
    while b" 429 " not in (await _post(url, body))[:20]:
        await asyncio.sleep(0.01)
    seconds = []
    for _ in range(NUM_REFUSALS):
        start = time.perf_counter()
        if b" 429 " not in (await _post(url, body))[:20]:
            raise InputError("requests that filled the server have ended: try a larger --step-ms")
        seconds.append(time.perf_counter() - start)
    for _, writer in inside:
        writer.close()
    times = {"median": percentile(seconds, 50), "p99": percentile(seconds, 99)}
    return {
        "refused_per_second": round(len(seconds) / sum(seconds)),
        "refusal_ms": {name: round(1e3 * value, 2) for name, value in times.items()},
    }
