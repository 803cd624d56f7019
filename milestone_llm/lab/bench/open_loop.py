"""An open loop: requests are sent at their times, also if the server cannot keep up.

A closed loop (a fixed number of clients, each waits for its answer) cannot show a growing queue: a
slow server gets fewer requests. Users do not know of each other, so their arrivals are a Poisson
process.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from .measure import PERCENTS, percentile
from .workloads import WorkItem

TOKEN_IDS = 150
"""Prompts consist of random ids below this, which every vocabulary has."""
PATIENCE = 600.0
"""Seconds after which a request counts as failed."""


@dataclass
class Outcome:
    """The result of a request. Times are in seconds after the start of the run."""

    due: float
    """When it had to be sent. Latencies count from here, so that a late client hides nothing."""
    sent: float = 0.0
    end: float = 0.0
    status: int = 0
    """HTTP status; 0: no answer."""
    is_complete: bool = False
    times: list[float] = field(default_factory=list)
    """When each event with a token arrived; an event may have several tokens."""
    num_tokens: int = 0
    """Output tokens, as counted by the server."""
    error: str = ""
    """Why it is not complete."""

    @property
    def ttft(self) -> float:
        """Seconds from `due` to the first token."""
        return self.times[0] - self.due

    @property
    def mean_gap(self) -> float:
        """Mean seconds between two tokens."""
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)


async def send_all(url: str, items: Sequence[WorkItem]) -> list[Outcome]:
    """Send each item when it arrives, and wait for all answers.

    Args:
        url: address of the server.
        items: requests whose prompts are token ids.

    Returns:
        Outcomes in the order of `items`.
    """
    start = time.perf_counter()

    async def follow(item: WorkItem) -> Outcome:
        outcome = Outcome(due=item.arrival_time)
        await asyncio.sleep(outcome.due - (time.perf_counter() - start))
        outcome.sent = time.perf_counter() - start
        try:
            await asyncio.wait_for(_ask(url, item, outcome, start), PATIENCE)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            outcome.is_complete = False
            outcome.error = str(error) or type(error).__name__
        outcome.end = time.perf_counter() - start
        return outcome

    return await asyncio.gather(*map(follow, items))


def body_of(item: WorkItem) -> dict[str, Any]:
    """Return the body of the request for an item."""
    names = ("max_tokens", "temperature", "seed", "ignore_eos")
    return {"prompt": item.prompt, **{name: getattr(item.params, name) for name in names}}


async def _ask(url: str, item: WorkItem, outcome: Outcome, start: float) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = {**body_of(item), "priority": item.priority, **stream}
    reader, writer = await open_request(url, body)
    try:
        status = re.match(rb"HTTP/1.1 (\d+)", await reader.readline())
        outcome.status = int(status[1]) if status else 0
        async for line in reader:
            outcome.error = line.decode(errors="replace")  # the last line of an error says why
            if line == b"data: [DONE]\n":
                outcome.is_complete = True
            elif line.startswith(b"data: "):
                _take(json.loads(line[6:]), outcome, time.perf_counter() - start)
        if outcome.status == 200 and not outcome.is_complete:
            outcome.error = "the stream broke off"
    finally:
        writer.close()


def _take(event: dict[str, Any], outcome: Outcome, now: float) -> None:
    if "error" in event:
        raise ValueError(event["error"])
    if event["choices"]:
        outcome.times.append(now)
    if event.get("usage"):
        outcome.num_tokens = event["usage"]["completion_tokens"]


def figures(
    outcomes: Sequence[Outcome], ttft_limit: float, itl_limit: float
) -> dict[str, float | None]:
    """Return a run's figures: times in ms, rates per second. A latency without values is None.

    TTFT is the time to the first token. ITL is the time between two events of a stream. TPOT is the
    mean time between two tokens of a request, also if an event has several.

    A request is good if it is complete, its first token came within `ttft_limit` ms, and its mean
    time between tokens is at most `itl_limit` ms.
    """
    done = [each for each in outcomes if each.is_complete and each.times]
    num_refused = sum(each.status == 429 for each in outcomes)
    good = [e for e in done if 1e3 * e.ttft <= ttft_limit and 1e3 * e.mean_gap <= itl_limit]
    seconds = max(each.end for each in outcomes)
    numbers: dict[str, float | None] = {
        "seconds": seconds,
        "offered": len(outcomes),
        "completed": len(done),
        "refused": num_refused,
        "failed": len(outcomes) - len(done) - num_refused,
        "good": len(good),
        "good_share": len(good) / len(outcomes),
        "completed_s": len(done) / seconds,
        "tok_s": sum(each.num_tokens for each in done) / seconds,
        "most_inside": _most_inside(done),
        "late_ms": 1e3 * max(each.sent - each.due for each in outcomes),
    }
    latencies = {
        "ttft": [each.ttft for each in done],
        "itl": [after - before for each in done for before, after in pairwise(each.times)],
        "tpot": [each.mean_gap for each in done if each.num_tokens > 1],
    }
    num_events = sum(len(each.times) for each in done)
    numbers["tokens_per_event"] = sum(e.num_tokens for e in done) / num_events if done else None
    for name, values in latencies.items():
        numbers[f"{name}_mean"] = 1e3 * fmean(values) if values else None
        for percent in (*PERCENTS, 100):
            key = f"{name}_max" if percent == 100 else f"{name}_p{percent}"
            numbers[key] = 1e3 * percentile(values, percent) if values else None
    return numbers


def _most_inside(done: Sequence[Outcome]) -> int:
    """Return the most requests that were running or waiting at one time."""
    changes = sorted([(e.sent, 1) for e in done] + [(e.end, -1) for e in done])
    return max(accumulate(change for _, change in changes), default=0)


async def open_request(
    url: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request for a completion, on a connection that ends with the answer.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        headers: in addition to those that it needs.

    Raises:
        OSError: no server listens at this address.
    """
    content, address = json.dumps(body).encode(), urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(
        address.hostname, address.port or 80, limit=2**22
    )
    writer.write(head.encode() + content)
    return reader, writer
