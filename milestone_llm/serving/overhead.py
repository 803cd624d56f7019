"""What does HTTP cost? `python -m milestone_llm.serving.overhead`

The same requests, all there at the start, in three ways: `generate` in a process of its own, and a
server that answers them whole and as streams. Then: requests refused a second, and the server's
memory over many short requests. Ways take turns, and medians of rounds count. CPU time is that of
the process with the engine, and beside it that of HTTP's; on a busy machine it says more than the
clock.

With --step-ms the model is replaced by a wait, to see a server under an engine as fast as a GPU's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from milestone_llm.bench.workloads import WORKLOADS
from milestone_llm.cli import (
    Formatter,
    add_options,
    config_fields,
    console,
    freeze_garbage,
    positive,
    run_command,
    try_to_write,
)

from . import timed
from .bench_report import machine
from .client import open_request


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.serving.overhead",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--milestone", default="m4_prefix_chunked", help="whose engine")
    add_options(parser, "model", "threads", "json")
    about = "its requests, all at one time, instead of those that the next options describe"
    add("--workload", choices=["mixed", "nano"], help=about)
    add("--requests", type=positive, default=16, metavar="N", help="at one time")
    add("--input-len", type=positive, default=32, metavar="N", help="tokens of each prompt")
    add("--output-len", type=positive, default=64, metavar="N", help="tokens of each output")
    add("--rounds", type=positive, default=3)
    add("--step-ms", type=float, help="instead of computing, wait so long in each step")
    add("--short-requests", type=int, default=0, metavar="N", help="to watch the memory under")
    add_options(parser, "set")
    return run_command(measure, parser.parse_args(arguments))


def measure(args: argparse.Namespace) -> None:
    """Print what is measured, and write it where --json says."""
    if args.json:
        try_to_write(args.json)
    work = make_work(args)
    args.requests = len(work)
    num_tokens, before = sum(item["max_tokens"] for item in work), machine()
    with TemporaryDirectory() as folder, Offline(args) as offline, Served(args, folder) as served:
        ways: dict[str, Callable[[], Times]] = {
            "generate": lambda: offline.timed(offline.work),
            "whole": lambda: served.timed(lambda: served.work(is_stream=False)),
            "stream": lambda: served.timed(lambda: served.work(is_stream=True)),
        }
        rounds: list[dict[str, Times]] = []
        for number in range(args.rounds + 1):
            times = {name: way() for name, way in ways.items()}
            rounds += [times] if number else []  # the first is for caches to fill
        result: dict[str, Any] = {
            "command": " ".join(["python -m milestone_llm.serving.overhead", *sys.argv[1:]]),
            "machine": before,
            "tokens_per_second": {
                name: round(num_tokens / statistics.median(r[name].wall for r in rounds), 1)
                for name in ways
            },
            "share_of_generate": {
                name: round(statistics.median(r["generate"].wall / r[name].wall for r in rounds), 3)
                for name in ("whole", "stream")
            },
            "cpu_ms_per_token": {
                name: round(1e3 * statistics.median(r[name].cpu for r in rounds) / num_tokens, 3)
                for name in ways
            },
            "http_cpu_ms_per_token": {
                name: round(1e3 * statistics.median(r[name].http for r in rounds) / num_tokens, 3)
                for name in ("whole", "stream")
            },
            "tokens_per_event": round(num_tokens / max(1, served.num_events), 2),
            **served.refusals(),
        }
        if args.short_requests:
            result["rss_mib_by_short_requests"] = served.memory(args.short_requests)
    console.print_json(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Times:
    """Seconds by the clock, and of CPU time, which other programs do not lengthen."""

    wall: float
    cpu: float
    """Of the process with the engine."""
    http: float
    """Of the one in front of it; 0 if there is none."""


class Process:
    """A child process."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
        self.process.start()

    def timed(self, work: Callable[[], object]) -> Times:
        """How long a piece of work takes."""
        start, before = time.perf_counter(), self._cpu_seconds()
        work()
        wall = time.perf_counter() - start
        http, cpu = (now - then for now, then in zip(self._cpu_seconds(), before, strict=True))
        return Times(wall, cpu, http)

    def _cpu_seconds(self) -> tuple[float, float]:
        """Of this process, if it has a child, and of the one with the engine."""
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self.pids()]
        fields = [stat.rpartition(")")[2].split() for stat in stats]
        ticks = [int(each[11]) + int(each[12]) for each in fields]
        *http, engine = (number / os.sysconf("SC_CLK_TCK") for number in ticks)
        return sum(http), engine

    def pids(self) -> list[int]:
        """This process and, if there is one, its child with the engine."""
        pid = self.process.pid
        assert pid is not None
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        engines = [child for child in map(int, children) if not _is_resource_tracker(child)]
        return [pid, *engines]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.join()


class Offline(Process):
    """An engine that does the work whenever it is told to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._pipe, inner = multiprocessing.Pipe()
        super().__init__(_generate_when_told, args, inner)

    def work(self) -> None:
        """Do it."""
        self._pipe.send(None)
        self._pipe.recv()


class Served(Process):
    """A server, and a client that costs next to nothing."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self._args = args
        self.num_events = 0
        log = Path(folder) / "log"
        log.touch()
        super().__init__(_serve, args, str(log))
        try:
            while not (found := re.search(r"127\.0\.0\.1:(\d+)\n", log.read_text())):
                if self.process.exitcode is not None:
                    raise ValueError(f"the server did not start: {log.read_text()}")
                time.sleep(0.1)
        except BaseException:  # Ctrl-C: nobody else would end it
            self.__exit__()
            raise
        self._url = f"http://127.0.0.1:{found[1]}"

    def work(self, is_stream: bool) -> None:
        """Have it done over HTTP."""
        bodies = [{**item, "stream": is_stream} for item in make_work(self._args)]
        answers = asyncio.run(self._post_all(bodies))
        assert all(b" 200 " in answer[:20] for answer in answers), answers[0][:500]
        self.num_events = sum(answer.count(b"data: {") for answer in answers)

    def refusals(self) -> dict[str, Any]:
        """How fast 429 is said, one connection after the other, while nobody else is let in."""
        body = {"prompt": [3], "max_tokens": 2**20, "ignore_eos": True, "stream": True}

        async def refuse() -> list[float]:
            num_inside = self._args.requests + 1  # all rows, and one that waits
            inside = [await open_request(self._url, body) for _ in range(num_inside)]
            while b" 429 " not in (await self._post(body))[:20]:
                await asyncio.sleep(0.01)
            seconds = []
            for _ in range(500):
                start = time.perf_counter()
                assert b" 429 " in (await self._post(body))[:20]
                seconds.append(time.perf_counter() - start)
            for _, writer in inside:
                writer.close()
            return sorted(seconds)

        seconds = asyncio.run(refuse())
        return {
            "refused_per_second": round(len(seconds) / sum(seconds)),
            "refusal_ms": {
                "median": round(1e3 * statistics.median(seconds), 2),
                "p99": round(1e3 * seconds[int(0.99 * len(seconds))], 2),
            },
        }

    def memory(self, num_requests: int) -> dict[int, float]:
        """MiB of the server after so many requests of one token."""
        seen = {0: self._rss()}
        bodies = [{"prompt": [3, 4, 5], "max_tokens": 1, "stream": True}] * self._args.requests
        done = 0
        for share in (0.1, 0.5, 1):
            while done < share * num_requests:
                asyncio.run(self._post_all(bodies))
                done += len(bodies)
            seen[done] = self._rss()
        return seen

    def _rss(self) -> float:
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids()]
        found = [re.search(r"VmRSS:\s+(\d+) kB", text) for text in texts]
        return round(sum(int(each[1]) for each in found if each) / 1024, 1)

    async def _post_all(self, bodies: list[dict[str, Any]]) -> list[bytes]:
        return await asyncio.gather(*(self._post(body) for body in bodies))

    async def _post(self, body: dict[str, Any]) -> bytes:
        reader, writer = await open_request(self._url, body)
        answer = await reader.read()
        writer.close()
        return answer


def _is_resource_tracker(pid: int) -> bool:
    """Whether a process is the one that multiprocessing starts beside those it is asked for."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


# --- in the children ------------------------------------------------------------------------------


def make_work(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Bodies of the requests; prompts are of small token ids, which every vocabulary has."""
    if args.workload:
        return [
            {
                "prompt": item.prompt,
                "max_tokens": item.params.max_tokens,
                "temperature": item.params.temperature,
                "seed": item.params.seed,
                "ignore_eos": True,
            }
            for item in WORKLOADS[args.workload](vocab_size=150)
        ]
    rest = {"max_tokens": args.output_len, "temperature": 0, "ignore_eos": True}
    return [
        {"prompt": [3 + (7 * i + j * (i + 1)) % 150 for j in range(args.input_len)], **rest}
        for i in range(args.requests)
    ]


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """Of the engine's configuration. All rounds have the same prompts: nothing is remembered."""
    known = [field.name for field in dataclasses.fields(_package(args).EngineConfig)]
    fields = {"max_num_seqs": args.requests, **config_fields(args.set)}
    if "enable_prefix_caching" in known:
        fields.setdefault("enable_prefix_caching", False)
    return fields


def _package(args: argparse.Namespace) -> Any:
    return importlib.import_module(args.milestone)


def _generate_when_told(args: argparse.Namespace, pipe: Connection) -> None:
    import torch

    from milestone_llm.engine.sampling_params import SamplingParams

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.step_ms is not None:
        timed.replace_model(args.milestone, args.step_ms)
    engine = _package(args).LLMEngine(args.model, **_fields(args))
    engine.warm_up()
    freeze_garbage()  # as the server does
    work = make_work(args)
    prompts = [item.pop("prompt") for item in work]
    params = [SamplingParams(**item) for item in work]
    while True:
        pipe.recv()
        engine.generate(prompts, params)
        pipe.send(None)


def _serve(args: argparse.Namespace, log: str) -> None:
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    options = ["--model", args.model, "--port", "0"]
    for name, value in _fields(args).items():
        name = name.replace("_", "-")
        switch = [f"--{name}"] if value else [f"--no-{name}"]
        options += switch if isinstance(value, bool) else [f"--{name}", str(value)]
    options += ["--max-queued", "1"] + (["--threads", str(args.threads)] if args.threads else [])
    if args.step_ms is not None:
        sys.exit(timed.main([args.milestone, "--step-ms", str(args.step_ms), *options]))
    sys.exit(importlib.import_module(f"{args.milestone}.serve").main(options))


if __name__ == "__main__":
    sys.exit(main())
