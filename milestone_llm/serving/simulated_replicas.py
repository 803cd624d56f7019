"""Replicas on paper, for `router_simulation`: a cache and a clock, behind the real router."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence

from .router import Router
from .simulated_clients import BLOCK_SIZE, TOKEN_S, Prompt

PREFILL_RATE, DECODE_RATE = 20_000, 5_000
"""Tokens a second of a replica."""
TICK_S = 0.01
"""How often the router hears of what has ended."""


class Cache:
    """The prefix cache of an engine: system prompts and sessions, least recently used first.

    Args:
        num_tokens: that it holds.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_free = num_tokens
        self._known: OrderedDict[int, int] = OrderedDict()
        """Tokens of a session without its system prompt, and of system prompt i as -i - 1."""

    def take(self, prompt: Prompt) -> int:
        """Remember what is asked and its answer; returns the prompt tokens that were there."""
        known, num_found = self._known, 0
        num_own = prompt.num_prompt - prompt.num_system + prompt.num_answer
        # The system prompt last, so that it is the last to go: who has a session has its beginning.
        for name, num_tokens in (
            (prompt.session, num_own),
            (-prompt.system - 1, prompt.num_system),
        ):
            num_known = known.get(name, 0)
            known[name] = num_tokens
            known.move_to_end(name)
            self._num_free -= num_tokens - num_known
            num_found += num_known
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

    def serve(self, prompt: Prompt) -> tuple[int, float, float]:
        """Take in a request; prompt tokens found, and when its first and its last token come."""
        num_found = self.cache.take(prompt)
        prefill_s = (prompt.num_prompt - num_found) / PREFILL_RATE
        decode_s = prompt.num_answer / DECODE_RATE
        first = max(prompt.now, self.free_at) + prefill_s
        self.free_at = first + decode_s
        self.busy_s += prefill_s + decode_s
        self.num_tokens += prompt.num_prompt + prompt.num_answer
        return num_found, first, max(self.free_at, first + prompt.num_answer * TOKEN_S)


class Alone:
    """One engine that gets all prompts, however long that takes it."""

    def __init__(self, cache_tokens: int) -> None:
        self._cache = Cache(cache_tokens)
        self._num_asked = self._num_found = 0

    def take(self, prompt: Prompt) -> None:
        """Look a prompt up."""
        self._num_asked += prompt.num_prompt
        self._num_found += self._cache.take(prompt)

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
        self._ending: dict[int, list[tuple[str, int]]] = {}
        """By tick: replicas whose requests end in it, and their tokens."""
        self._tick = 0
        self._num_asked = self._num_found = 0
        self._now = self._router_s = 0.0
        self._ttfts: list[float] = []
        self._peaks: list[float] = []
        self._peak_every = args.prompts // 100 + 1

    def take(self, prompt: Prompt) -> None:
        """Send a prompt to a replica, once those that have ended by then are settled."""
        router, num_tokens = self._router, prompt.num_prompt + prompt.num_answer
        ended: list[tuple[str, int]] = []
        while self._tick < int(prompt.now / TICK_S):
            ended += self._ending.pop(self._tick, ())
            self._tick += 1
        start = time.perf_counter()
        for name, num_ended in ended:
            router.note_finished(name, num_ended)
        name = router.choose(prompt.names, num_tokens)
        self._router_s += time.perf_counter() - start
        num_found, first, last = self._replicas[name].serve(prompt)
        self._ending.setdefault(int(last / TICK_S), []).append((name, num_tokens))
        self._now = prompt.now
        self._num_found += num_found
        self._num_asked += prompt.num_prompt
        self._ttfts.append(first - prompt.now)
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
