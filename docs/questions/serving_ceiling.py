"""How many tokens a second can HTTP's process stream, and how long do they wait there?

    python -m docs.questions.serving_ceiling

The engine's process computes nothing. At set times it sends a token for every stream, in messages
like those of a real step. All else is real: pipe, text, stop strings, JSON, sockets. A client reads
and throws away. The rate rises until it is not kept. How long
events wait, from the end of a step to the socket, is what the server says: one of the bounds of its
metric `token_delivery_seconds`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import selectors
import socket
import sys
import time
import urllib.request
from bisect import bisect_left
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.load.server import RunningServer, running_server
from milestone_llm.serving.api.metrics import DELIVERY_SECONDS
from milestone_llm.serving.command import serve_command

from .serving_words import give_words

if TYPE_CHECKING:
    from milestone_llm.frontend.engine import BaseEngine
    from milestone_llm.serving.engine.loop import EngineLoop

NUM_STREAMS = (64, 256)
RATES = (5_000, 10_000, 20_000, 40_000, 80_000)
"""Tokens a second, of all streams together."""
BEGIN_SECONDS, SECONDS, KEPT = 0.5, 1.0, 0.8
OPTIONS = "--model tiny-llama --device cpu --threads 1 --max-num-seqs 256 --disable-log-stats"


class Counts(NamedTuple):
    """What has happened in a server since its start."""

    num_streams: float
    """There are now: the engine takes them for requests that wait."""
    num_tokens: float
    in_time: list[float]
    """Events that have left within each of `DELIVERY_SECONDS`, and all of them."""
    cpu_seconds: float
    """Of HTTP's process."""


def main() -> None:
    """Measure, and print a line for each rate."""
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    print(" streams  tokens/s     step  really  an event  99 % within   cores  per 1,000/s")
    words = ["docs.questions.serving_ceiling", "serve", *OPTIONS.split()]
    with running_server(words) as server:
        for num_streams in NUM_STREAMS:
            for rate in RATES:
                if show_rate(server, num_streams, num_streams / rate) < KEPT * rate:
                    break


def show_rate(server: RunningServer, num_streams: int, step: float) -> float:
    """Measure a rate, and print it; the tokens that were sent a second."""
    client = multiprocessing.Process(target=read, args=(server.url, num_streams, step))
    client.start()
    while counts_of(server).num_streams < num_streams:
        time.sleep(0.1)
    time.sleep(BEGIN_SECONDS)
    before, start = counts_of(server), time.perf_counter()
    time.sleep(SECONDS)
    after, seconds = counts_of(server), time.perf_counter() - start
    client.kill()
    client.join()
    while counts_of(server).num_streams:
        time.sleep(0.1)
    num_tokens = after.num_tokens - before.num_tokens
    in_time = [now - then for now, then in zip(after.in_time, before.in_time, strict=True)]
    cores = (after.cpu_seconds - before.cpu_seconds) / seconds
    bounds = [*(f"{1e3 * bound:g} ms" for bound in DELIVERY_SECONDS), "longer"]
    within = bounds[bisect_left(in_time, 0.99 * in_time[-1])]
    rate, wanted = num_tokens / seconds, num_streams / step
    print(
        f"{num_streams:8} {wanted:9,.0f} {1e3 * step:5.1f} ms {rate:7,.0f} "
        f"{num_tokens / in_time[-1]:9.2f} {within:>12} {cores:7.2f} "
        f"{1e3 * cores / rate:12.1%}",
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


def read(url: str, num_streams: int, step: float) -> None:
    """A client: reads what comes from its streams, and forgets it, until it is ended."""
    with ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        for _ in range(num_streams):
            stream = stack.enter_context(opened(url, round(1e6 * step)))
            ready.register(stream, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                key.fileobj.recv(2**16)  # type: ignore[union-attr]


def counts_of(server: RunningServer) -> Counts:
    """Counts until now."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        text = page.read().decode()

    def figures(name: str) -> list[float]:
        lines = re.findall(rf"^milestone_llm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return [float(line) for line in lines]

    (num_streams,), (num_tokens,) = map(
        figures, ("num_requests_waiting", "generation_tokens_total")
    )
    in_time = figures("token_delivery_seconds_bucket")
    return Counts(num_streams, num_tokens, in_time, server.cpu_seconds()[0])


def send_tokens(engine: BaseEngine) -> None:
    """In the engine's process: instead of steps, a token for each request when it is due."""
    from milestone_llm.serving.engine.loop import EngineLoop  # and torch, which HTTP does not load

    give_words(engine)
    due = 0.0

    def step(loop: EngineLoop) -> None:
        nonlocal due
        requests = loop._driver.requests
        request = next(reversed(requests.values()))
        now = time.perf_counter()
        due = max(due + 1e-6 * (request.sampling_params.seed or 0), now - 0.1)
        time.sleep(max(0.0, due - now))
        loop._sending.process([EngineCoreOutput(name, [7]) for name in requests])

    EngineLoop._step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve_command("m4_prefix_chunked", __doc__, sys.argv[2:], prepare=send_tokens))
    main()
