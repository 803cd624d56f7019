"""The processes that `overhead` times: an engine by itself, and one behind a server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from milestone_llm.lab.bench.workloads import WORKLOADS
from milestone_llm.cli import config_fields, ended_in_one_line, freeze_garbage

from . import timed
from .client import open_request


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
        inner.close()

    def work(self) -> None:
        """Do it."""
        try:
            self._pipe.send(None)
            self._pipe.recv()
        except (EOFError, OSError):
            raise ChildProcessError("the engine's process has ended, see above") from None


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
                    raise ChildProcessError("the server did not start, see above")
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
    sys.exit(ended_in_one_line(lambda: _generate(args, pipe)))


def _generate(args: argparse.Namespace, pipe: Connection) -> None:
    import torch

    from milestone_llm.core.sampling_params import SamplingParams

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
