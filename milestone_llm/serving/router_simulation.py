"""A thousand replicas on paper: what does a router find, how even is the load, what does it cost?

The router is the real one (`router.py`), with blocks of 16 tokens and names of 32 bytes. Clients
and replicas are simulated, one event after the other:

- Sessions begin at random times (Poisson), 6 prompts a second for each replica on average. Each
  begins with a system prompt of 256..1,024 tokens, drawn by Zipf's law (exponent 1) from ten for
  each replica, and has 3 turns on average (geometric). A turn adds a question of 16..256 tokens and
  an answer of 32..512. The next turn comes after 10 ms for each token of the answer and 10 s of
  thinking (exponential). All policies get the same prompts at the same times.
- A replica has a prefix cache (least recently used goes first). It computes 20,000 prompt tokens
  a second and makes 5,000 output tokens a second, one request's after the other's; an answer takes
  10 ms a token at least.

Left out: steps and batches; the KV of running requests, which leaves a real cache less; eviction of
part of a turn; the network; failures; questions that come later because their answer was late.
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
import random
import statistics
import sys
import time
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from milestone_llm.cli import Formatter, add_options, console, positive, progress_bar, run_command

from .router import Router

BLOCK_SIZE = 16
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = (256, 1024), (16, 256), (32, 512)
SYSTEMS_EACH = 10
"""System prompts for each replica."""
PROMPTS_A_SECOND = 6.0
"""For each replica."""
MEAN_TURNS, MEAN_THINKING_S = 3, 10.0
PREFILL_RATE, DECODE_RATE = 20_000, 5_000
"""Tokens a second of a replica."""
TOKEN_S = 0.01
"""Seconds for each token of an answer, at least."""

ALL_CACHES, ONE_CACHE = "one engine, all caches", "one engine, one cache"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.serving.router_simulation",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--replicas", type=positive, default=8, metavar="N")
    add("--prompts", type=positive, default=8000, metavar="N", help="of all sessions")
    add("--cache-tokens", type=positive, default=65_536, metavar="N", help="of one replica's cache")
    add("--stride", type=positive, default=8, metavar="N", help="of the router, in blocks")
    add_options(parser, "seed")
    return run_command(simulate_all, parser.parse_args(arguments))


# --- clients --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Session:
    """A conversation. Its parts are its system prompt and its turns, each with its answer."""

    number: int
    parts: list[tuple[int, int]]
    """A name of each part, and its tokens."""
    names: list[bytes]
    """Of every `stride`-th block of the prompt: what a router of this stride remembers."""
    turns: list[tuple[int, int]]
    """Tokens of the questions and answers that are to come, the last first."""
    num_prompt: int = 0
    """Tokens of the prompt that is asked now."""
    num_answer: int = 0
    """Tokens of its answer."""


class Clients:
    """What is asked, and when; the same for all policies.

    Args:
        stride: name every `stride`-th block only.
    """

    def __init__(self, num_replicas: int, stride: int, seed: int) -> None:
        self._random = random.Random(seed).random
        self._sessions_a_second = num_replicas * PROMPTS_A_SECOND / MEAN_TURNS
        self._name_tokens = stride * BLOCK_SIZE
        numbers = range(SYSTEMS_EACH * num_replicas)
        self._systems = [self._between(SYSTEM_TOKENS) for _ in numbers]
        self._system_names = [
            _names(-number - 1, 0, num_tokens // self._name_tokens)
            for number, num_tokens in enumerate(self._systems)
        ]
        self._zipf = list(accumulate(1 / (number + 1) for number in numbers))
        self._num_sessions = 0

    def prompts(self, num_prompts: int) -> Iterator[tuple[float, Session]]:
        """Seconds, and the session that asks then, in the order of time."""
        coming: list[tuple[float, int, Session]] = []
        begin = 0.0
        for _ in range(num_prompts):
            while not coming or begin <= coming[0][0]:
                session = self._begin()
                heapq.heappush(coming, (begin, session.number, session))
                begin += self._exponential(1 / self._sessions_a_second)
            now, number, session = heapq.heappop(coming)
            self._ask(session)
            yield now, session
            if session.turns:
                later = session.num_answer * TOKEN_S + self._exponential(MEAN_THINKING_S)
                heapq.heappush(coming, (now + later, number, session))

    def _begin(self) -> Session:
        self._num_sessions += 1
        system = bisect(self._zipf, self._random() * self._zipf[-1])
        turns: list[tuple[int, int]] = []
        while not turns or self._random() >= 1 / MEAN_TURNS:
            turns.append((self._between(QUESTION_TOKENS), self._between(ANSWER_TOKENS)))
        num_tokens = self._systems[system]
        names = list(self._system_names[system])
        return Session(self._num_sessions, [(-system - 1, num_tokens)], names, turns, num_tokens)

    def _ask(self, session: Session) -> None:
        """The next question, after the answer to the one before."""
        num_question, num_answer = session.turns.pop()
        session.num_prompt += session.num_answer + num_question
        session.num_answer = num_answer
        part = (session.number << 20) + len(session.parts)
        session.parts.append((part, num_question + num_answer))
        end = session.num_prompt // self._name_tokens
        session.names += _names(session.number, len(session.names), end)

    def _between(self, limits: tuple[int, int]) -> int:
        return limits[0] + int(self._random() * (limits[1] - limits[0] + 1))

    def _exponential(self, mean: float) -> float:
        return -mean * math.log(1 - self._random())


def _names(owner: int, first: int, end: int) -> list[bytes]:
    """Stand-ins for SHA-256: as long, and as distinct."""
    return [((owner << 20) + i).to_bytes(32, "big", signed=True) for i in range(first, end)]


# --- replicas -------------------------------------------------------------------------------------


class Cache:
    """The prefix cache of an engine: parts of sessions, least recently used first.

    Args:
        num_tokens: that it holds.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_free = num_tokens
        self._parts: OrderedDict[int, int] = OrderedDict()

    def take(self, session: Session) -> int:
        """Remember what is asked and its answer; returns the prompt tokens that were there."""
        known, num_found = self._parts, 0
        for part, num_tokens in session.parts:
            if part not in known:
                break
            num_found += num_tokens
        for part, num_tokens in reversed(session.parts):  # the beginning is the last to go
            if part in known:
                known.move_to_end(part)
            else:
                known[part] = num_tokens
                self._num_free -= num_tokens
        while self._num_free < 0:
            self._num_free += known.popitem(last=False)[1]
        return num_found


class SimulatedReplica:
    """An engine that computes one request after the other, at stated rates."""

    def __init__(self, cache_tokens: int) -> None:
        self.cache = Cache(cache_tokens)
        self.free_at = 0.0
        self.busy_s = 0.0
        self.num_tokens = 0
        """Of all requests so far, prompts and answers."""

    def serve(self, now: float, session: Session) -> tuple[int, float, float]:
        """Take in a request; prompt tokens found, and when its first and its last token come."""
        num_found = self.cache.take(session)
        prefill_s = (session.num_prompt - num_found) / PREFILL_RATE
        decode_s = session.num_answer / DECODE_RATE
        first = max(now, self.free_at) + prefill_s
        self.free_at = first + decode_s
        self.busy_s += prefill_s + decode_s
        self.num_tokens += session.num_prompt + session.num_answer
        return num_found, first, max(self.free_at, first + session.num_answer * TOKEN_S)


# --- contestants ----------------------------------------------------------------------------------


class Alone:
    """One engine that gets all prompts, however long that takes it."""

    def __init__(self, cache_tokens: int) -> None:
        self._cache = Cache(cache_tokens)
        self._num_asked = self._num_found = 0

    def take(self, now: float, session: Session) -> None:
        """Look a prompt up."""
        self._num_asked += session.num_prompt
        self._num_found += self._cache.take(session)

    def report(self) -> dict[str, float]:
        """The share of prompt tokens that were cached."""
        return {"hit_rate": self._num_found / self._num_asked}


class Routed:
    """Replicas behind a router."""

    def __init__(self, policy: str, args: argparse.Namespace) -> None:
        max_names = max(1, args.cache_tokens // BLOCK_SIZE // args.stride)
        self._router = Router(policy, max_blocks=max_names, seed=args.seed)
        self._replicas = {
            f"r{i}": SimulatedReplica(args.cache_tokens) for i in range(args.replicas)
        }
        for name in self._replicas:
            self._router.add(name)
        self._running: list[tuple[float, str, int]] = []
        self._num_asked = self._num_found = 0
        self._now = self._router_s = 0.0
        self._ttfts: list[float] = []
        self._peaks: list[float] = []
        self._peak_every = args.prompts // 100 + 1

    def take(self, now: float, session: Session) -> None:
        """Send a prompt to a replica, once those that have ended by then are settled."""
        router, running = self._router, self._running
        num_tokens = session.num_prompt + session.num_answer
        ended = []
        while running and running[0][0] <= now:
            ended.append(heapq.heappop(running))
        start = time.perf_counter()
        for _, name, num_ended in ended:
            router.note_finished(name, num_ended)
        name = router.choose(session.names, num_tokens)
        self._router_s += time.perf_counter() - start
        num_found, first, last = self._replicas[name].serve(now, session)
        heapq.heappush(running, (last, name, num_tokens))
        self._now = now
        self._num_found += num_found
        self._num_asked += session.num_prompt
        self._ttfts.append(first - now)
        if len(self._ttfts) % self._peak_every == 0:
            loads = [router.num_outstanding(name) for name in self._replicas]
            self._peaks.append(max(loads) / statistics.mean(loads))

    def report(self) -> dict[str, float]:
        """Loads are in units of the mean over all replicas, times in seconds.

        - `hit_rate`: share of prompt tokens that were cached;
        - `sent_max`, `sent_p99`: tokens that a replica was sent in all;
        - `outstanding_max`: outstanding tokens of the fullest replica, the median over instants;
        - `busy`: share of the time in which a replica had something to compute;
        - `ttft_p99`: to the first token;
        - `names`, `bytes`: what the router remembers;
        - `decision_s`: of the router for each prompt, to choose and to note the end.
        """
        sent = sorted(replica.num_tokens for replica in self._replicas.values())
        busy_s = sum(replica.busy_s for replica in self._replicas.values())
        stats = self._router.stats()
        return {
            "hit_rate": self._num_found / self._num_asked,
            "sent_max": sent[-1] / statistics.mean(sent),
            "sent_p99": _percentile_99(sent) / statistics.mean(sent),
            "outstanding_max": statistics.median(self._peaks),
            "busy": busy_s / self._now / len(self._replicas),
            "ttft_p99": _percentile_99(sorted(self._ttfts)),
            "names": stats["names"],
            "bytes": stats["bytes"],
            "decision_s": self._router_s / len(self._ttfts),
        }


def _percentile_99(values: Sequence[float]) -> float:
    return values[int(0.99 * (len(values) - 1))]


# --- runs -----------------------------------------------------------------------------------------

Report = dict[str, float]
_done: Any = None
"""In a child process: prompts that each of them is through with, for the progress bar."""


def simulate(labels: Sequence[str], args: argparse.Namespace, place: int = 0) -> dict[str, Report]:
    """Some policies of the router, `ALL_CACHES` or `ONE_CACHE`, each with all prompts.

    Args:
        place: in the progress bar.
    """
    sizes = {ALL_CACHES: args.cache_tokens * args.replicas, ONE_CACHE: args.cache_tokens}
    contestants: dict[str, Alone | Routed] = {
        label: Alone(sizes[label]) if label in sizes else Routed(label, args) for label in labels
    }
    clients = Clients(args.replicas, args.stride, args.seed)
    for count, (now, session) in enumerate(clients.prompts(args.prompts)):
        for contestant in contestants.values():
            contestant.take(now, session)
        if _done is not None and count % 1000 == 0:
            _done[place] = count
    return {label: contestant.report() for label, contestant in contestants.items()}


def simulate_all(args: argparse.Namespace) -> None:
    """Two processes, as one with the policy prefix takes as long as one with all others."""
    context = multiprocessing.get_context("spawn")
    done = context.Array("q", 2, lock=False)
    shares = [["prefix"], ["round-robin", "random", ALL_CACHES, ONE_CACHE]]
    start, total = time.perf_counter(), 2 * args.prompts
    with (
        ProcessPoolExecutor(2, context, _begin_child, (done,)) as pool,
        progress_bar() as bar,
    ):
        task = bar.add_task("simulated", total=total, count="")
        futures = [pool.submit(simulate, share, args, i) for i, share in enumerate(shares)]
        while not all(future.done() for future in futures):
            bar.update(task, completed=sum(done), count=f"{sum(done) / total:.0%}")
            time.sleep(0.1)
        _print(futures[0].result() | futures[1].result(), args)
    console.print(f"\nAll of it took {time.perf_counter() - start:.0f} s.")


def _begin_child(done: Any) -> None:
    global _done
    _done = done


def _print(reports: dict[str, Report], args: argparse.Namespace) -> None:
    """What clients and replicas get, and what the router costs."""
    console.print(
        f"{args.prompts:,} prompts, {args.replicas:,} replicas with a cache of "
        f"{args.cache_tokens:,} tokens each\n\n"
        "                        prompt tokens  load of one replica     busy   first\n"
        "                           cached      sent, all   at a time  of the   token\n"
        "                                       max   p99      max      time     p99"
    )
    for label, report in reports.items():
        line = f"{label:24}{report['hit_rate']:10.1%}"
        if "busy" in report:
            line += (
                "{sent_max:11.2f}{sent_p99:6.2f}{outstanding_max:9.2f}{busy:10.0%}".format(**report)
                + f"{report['ttft_p99'] * 1e3:9,.0f} ms"
            )
        console.print(line, soft_wrap=True)
    router = reports["prefix"]
    console.print(
        f"\nOf what all caches in one engine would find, prefix finds "
        f"{router['hit_rate'] / reports[ALL_CACHES]['hit_rate']:.1%}. It remembers\n"
        f"{router['names']:,} names, one for {args.stride} blocks of {BLOCK_SIZE} tokens: "
        f"{router['bytes'] / 1e6:,.1f} MB, {router['bytes'] / router['names']:,.0f} bytes each.\n"
        f"A decision takes {router['decision_s'] * 1e6:,.1f} us, by round-robin "
        f"{reports['round-robin']['decision_s'] * 1e6:,.1f} us; "
        f"decisions a second: {1 / router['decision_s']:,.0f}.",
    )


if __name__ == "__main__":
    sys.exit(main())
