"""How many tokens a second can one process for HTTP stream, and how long do they wait there?

    python -m docs.questions.serving_ceiling

The engine's process computes nothing. At set times it sends a token for every stream, in messages
like those of a real step. All else is real: pipe, text, stop strings, JSON, sockets. A client in a
third process reads and throws away. The rate rises until it is not kept. How long events wait, from
the end of a step to the socket, is what the server says: one of the bounds of its metric
`token_delivery_seconds`.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import sys
import time
import urllib.request
from bisect import bisect_left
from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple
from urllib.parse import urlsplit

from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.serving.bench_server import RunningServer, running_server
from milestone_llm.serving.command import serve_command
from milestone_llm.serving.engine_client import EngineCoreOutputs
from milestone_llm.serving.engine_loop import EngineLoop
from milestone_llm.serving.shared_counts import DELIVERY_SECONDS

from .serving_words import give_words

NUM_STREAMS = (64, 256)
RATES = (2_500, 5_000, 10_000, 15_000, 20_000, 30_000, 40_000, 60_000)
"""Tokens a second, of all streams together."""
SECONDS, KEPT = 2.0, 0.8
OPTIONS = "--model tiny-llama --device cpu --threads 1 --max-num-seqs 256 --disable-log-stats"


class Counts(NamedTuple):
    """What has happened in a server since its start."""

    num_tokens: float
    in_time: list[float]
    """Events that have left within each of `DELIVERY_SECONDS`, and all of them."""
    cpu_seconds: float
    """Of HTTP's process."""


def main() -> None:
    """Measure, and print a line for each rate."""
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    print("streams  tokens/s     step  really  an event  99 % within  of a core  per 1,000/s")
    with running_server(["docs.questions.serving_ceiling", *OPTIONS.split()]) as server:
        for num_streams in NUM_STREAMS:
            for rate in RATES:
                if show_rate(server, num_streams, num_streams / rate) < KEPT * rate:
                    break


def show_rate(server: RunningServer, num_streams: int, step: float) -> float:
    """Measure a rate, and print it; the tokens that were sent a second."""
    with ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        for _ in range(num_streams):
            stream = stack.enter_context(opened(server.url, round(1e6 * step)))
            ready.register(stream, selectors.EVENT_READ)
        read_for(1.0, ready)
        before, start = counts_of(server), time.perf_counter()
        read_for(SECONDS, ready)
        after, seconds = counts_of(server), time.perf_counter() - start
    num_tokens = after.num_tokens - before.num_tokens
    in_time = [now - then for now, then in zip(after.in_time, before.in_time, strict=True)]
    core = (after.cpu_seconds - before.cpu_seconds) / seconds
    bounds = [*(f"{1e3 * bound:g} ms" for bound in DELIVERY_SECONDS), "longer"]
    within = bounds[bisect_left(in_time, 0.99 * in_time[-1])]
    rate, wanted = num_tokens / seconds, num_streams / step
    print(
        f"{num_streams:7} {wanted:9,.0f} {1e3 * step:5.1f} ms {rate:7,.0f} "
        f"{num_tokens / in_time[-1]:9.2f} {within:>12} {core:10.0%} "
        f"{1e3 * core / rate:12.1%}",
        flush=True,
    )
    return rate


def opened(url: str, step_microseconds: int) -> socket.socket:
    """A stream without an end. The engine takes its seed for the time of a step."""
    address = urlsplit(url)
    body = json.dumps({"prompt": [5], "max_tokens": 9, "stream": True, "seed": step_microseconds})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    stream = socket.create_connection((address.hostname, address.port))
    stream.sendall((head + body).encode())
    return stream


def read_for(seconds: float, ready: selectors.BaseSelector) -> None:
    """Read what comes from all streams, and forget it."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for key, _ in ready.select(0.1):
            key.fileobj.recv(2**16)  # type: ignore[union-attr]


def counts_of(server: RunningServer) -> Counts:
    """Counts until now."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        text = page.read().decode()

    def figures(name: str) -> list[float]:
        lines = re.findall(rf"^milestone_llm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return [float(line) for line in lines]

    (num_tokens,) = figures("generation_tokens_total")
    in_time = figures("token_delivery_seconds_bucket")
    return Counts(num_tokens, in_time, server.cpu_seconds()[0])


def send_tokens(engine: BaseEngine) -> None:
    """In the engine's process: instead of steps, a token for each request when it is due."""
    give_words(engine)
    due = 0.0

    def step(loop: EngineLoop) -> None:
        nonlocal due
        request = next(reversed(loop._requests.values()))
        now = time.perf_counter()
        due = max(due + 1e-6 * (request.sampling_params.seed or 0), now - 0.1)
        time.sleep(max(0.0, due - now))
        ids = list(loop._requests)
        loop._metrics.note_tokens(len(ids), Counter())
        loop._deliver(EngineCoreOutputs(request_ids=ids, token_ids=[7] * len(ids)))

    EngineLoop._step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(serve_command("m4_prefix_chunked", __doc__, sys.argv[1:], prepare=send_tokens))
    main()
