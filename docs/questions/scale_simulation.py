"""A thousand replicas on paper: what does a router find, how even is the load, what does it cost?

    python -m docs.questions.scale_simulation --replicas 1000 --prompts 1000000

The router is the real one (`router.py`), with blocks of 16 tokens and names of 32 bytes. Clients
and replicas are simulated, one event after the other:

- Sessions begin at random times (Poisson), 6 prompts a second for each replica on average. Each
  begins with a system prompt of 256..1,024 tokens, drawn by Zipf's law (exponent 1) from ten for
  each replica, and has 3 turns on average (geometric). A turn adds a question of 16..256 tokens and
  an answer of 32..512. The next turn comes after 10 ms for each token of the answer and 10 s of
  thinking (exponential). All policies get the same prompts at the same times.
- A replica has a prefix cache (least recently used goes first). It computes 20,000 prompt tokens
  a second and makes 5,000 output tokens a second, one request's after the other's; an answer takes
  10 ms a token at least. The router hears of what has ended every 10 ms.

Left out: steps and batches; the KV of running requests, which leaves a real cache less; eviction of
part of a session; the network; failures; questions that come later because their answer was late.
"""

import argparse
import gc
import multiprocessing
import statistics
import sys
import time
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from milestone_llm.command.cli import Formatter, add_options, ended_in_one_line, positive
from milestone_llm.serving.replicas.router import Router

BLOCK_SIZE = 16
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = (256, 1024), (16, 256), (32, 512)
SYSTEMS_EACH, PROMPTS_A_SECOND = 10, 6.0  # for each replica
MEAN_TURNS, MEAN_THINKING_S, TOKEN_S = 3, 10.0, 0.01
PREFILL_RATE, DECODE_RATE = 20_000, 5_000  # tokens a second of a replica
TICK_S = 0.01  # how often the router hears of what has ended
ALL_CACHES, ONE_CACHE = "one engine, all caches", "one engine, one cache"


# --- clients --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Prompt:
    """A question of a session, with all that was said before."""

    now: float
    """Seconds since the start."""
    session: int
    system: int
    """Which system prompt it begins with."""
    num_system: int
    num_prompt: int
    """Tokens of all of it."""
    num_answer: int
    """Tokens of the answer that is to come."""
    names: list[bytes]
    """Of every `stride`-th block of the prompt: what a router of this stride remembers."""


def prompts_of(num_replicas, num_prompts, stride, seed):
    """What is asked, in the order of time. Everything is drawn at the start.

    Args:
        stride: name every `stride`-th block only; no block if None.
    """
    draw = np.random.default_rng(seed)
    num_sessions = num_prompts  # more than begin in that time
    begin = draw.exponential(MEAN_TURNS / num_replicas / PROMPTS_A_SECOND, num_sessions).cumsum()
    num_systems = SYSTEMS_EACH * num_replicas
    zipf = (1 / np.arange(1, num_systems + 1)).cumsum()
    system = zipf.searchsorted(draw.random(num_sessions) * zipf[-1])
    system_tokens = draw.integers(*SYSTEM_TOKENS, num_systems, endpoint=True)
    # What follows has an entry for each turn, one session's turns after another's.
    num_turns = draw.geometric(1 / MEAN_TURNS, num_sessions)
    first, session = num_turns.cumsum() - num_turns, np.arange(num_sessions).repeat(num_turns)
    question = draw.integers(*QUESTION_TOKENS, len(session), endpoint=True)
    answer = draw.integers(*ANSWER_TOKENS, len(session), endpoint=True)
    pause = answer * TOKEN_S + draw.exponential(MEAN_THINKING_S, len(session))

    def before(values):
        """For each turn, the sum over the turns of its session before it."""
        sums = values.cumsum() - values
        return sums - sums[first[session]]

    now, system = begin[session] + before(pause), system[session]
    num_system = system_tokens[system]
    num_prompt = num_system + before(question + answer) + question
    order = now.argsort(kind="stable")[:num_prompts]
    columns = [each[order] for each in (now, session, system, num_system, num_prompt, answer)]
    name_tokens = stride * BLOCK_SIZE if stride else sys.maxsize
    system_names = [
        names_of(-number - 1, 0, num_tokens // name_tokens)
        for number, num_tokens in enumerate(system_tokens.tolist())
    ]
    num_parts = num_prompts // 10_000 + 1  # not all numbers as objects at one time
    for part in zip(*(np.array_split(column, num_parts) for column in columns), strict=True):
        for row in zip(*(column.tolist() for column in part), strict=True):
            _, owner, number, _, num_tokens, _ = row
            shared = system_names[number]
            yield Prompt(*row, shared + names_of(owner, len(shared), num_tokens // name_tokens))


def names_of(owner, first, end):
    """Stand-ins for SHA-256: as long, and as distinct."""
    return [((owner << 20) + i).to_bytes(32, "big", signed=True) for i in range(first, end)]


# --- replicas -------------------------------------------------------------------------------------


class Cache:
    """The prefix cache of an engine: system prompts and sessions, least recently used first."""

    def __init__(self, num_tokens):
        self.num_free = num_tokens
        self.known = OrderedDict()  # tokens of a session without its system prompt i, which is -i-1
        self.num_asked = self.num_found = 0

    def take(self, prompt):
        """Remember what is asked and its answer; returns the prompt tokens that were there."""
        num_own, num_found = prompt.num_prompt - prompt.num_system + prompt.num_answer, 0
        # The system prompt last, so that it is the last to go: who has a session has its beginning.
        for name, size in ((prompt.session, num_own), (-prompt.system - 1, prompt.num_system)):
            num_known = self.known.get(name, 0)
            self.known[name] = size
            self.known.move_to_end(name)
            self.num_free -= size - num_known
            num_found += num_known
        while self.num_free < 0:
            self.num_free += self.known.popitem(last=False)[1]
        self.num_asked += prompt.num_prompt
        self.num_found += num_found
        return num_found

    def report(self):
        """The share of prompt tokens that were cached."""
        return {"hit_rate": self.num_found / self.num_asked}


class SimulatedReplica:
    """An engine that computes one request after the other, at stated rates."""

    def __init__(self, cache_tokens):
        self.cache = Cache(cache_tokens)
        self.free_at = self.busy_s = 0.0
        self.num_tokens = 0  # of all requests so far, prompts and answers

    def serve(self, prompt):
        """Take in a request; prompt tokens found, and when its first and its last token come."""
        num_found = self.cache.take(prompt)
        prefill_s = (prompt.num_prompt - num_found) / PREFILL_RATE
        decode_s = prompt.num_answer / DECODE_RATE
        first = max(prompt.now, self.free_at) + prefill_s
        self.free_at = first + decode_s
        self.busy_s += prefill_s + decode_s
        self.num_tokens += prompt.num_prompt + prompt.num_answer
        return num_found, first, max(self.free_at, first + prompt.num_answer * TOKEN_S)


class Routed:
    """Replicas behind the real router."""

    def __init__(self, policy, args):
        max_names = max(1, args.cache_tokens // BLOCK_SIZE // args.stride)
        self.router = Router(policy, max_blocks=max_names, seed=args.seed)
        self.replicas = {f"r{i}": SimulatedReplica(args.cache_tokens) for i in range(args.replicas)}
        for name in self.replicas:
            self.router.add(name)
        self.ending = {}  # by tick: replicas whose requests end in it, and their tokens
        self.tick = 0
        self.now = self.router_s = 0.0
        self.ttfts, self.peaks, self.peak_every = [], [], args.prompts // 100 + 1

    def take(self, prompt):
        """Send a prompt to a replica, once those that have ended by then are settled."""
        router, num_tokens, ended = self.router, prompt.num_prompt + prompt.num_answer, []
        while self.tick < int(prompt.now / TICK_S):
            ended += self.ending.pop(self.tick, ())
            self.tick += 1
        start = time.perf_counter()
        for name, num_ended in ended:
            router.note_finished(name, num_ended)
        name = router.choose(prompt.names, num_tokens)
        self.router_s += time.perf_counter() - start
        _, first, last = self.replicas[name].serve(prompt)
        self.ending.setdefault(int(last / TICK_S), []).append((name, num_tokens))
        self.now = prompt.now
        self.ttfts.append(first - prompt.now)
        if len(self.ttfts) % self.peak_every == 0:
            loads = [router.num_outstanding(name) for name in self.replicas]
            self.peaks.append(max(loads) / statistics.mean(loads))

    def report(self):
        """Loads are in units of the mean over all replicas, times in seconds."""
        replicas, stats = self.replicas.values(), self.router.stats()
        sent, ttfts = sorted(each.num_tokens for each in replicas), sorted(self.ttfts)
        asked = sum(each.cache.num_asked for each in replicas)
        return {
            "hit_rate": sum(each.cache.num_found for each in replicas) / asked,
            "sent_max": sent[-1] / statistics.mean(sent),
            "sent_p99": sent[int(0.99 * (len(sent) - 1))] / statistics.mean(sent),
            "outstanding_max": statistics.median(self.peaks),  # of the fullest, over instants
            "busy": sum(each.busy_s for each in replicas) / self.now / len(replicas),
            "ttft_p99": ttfts[int(0.99 * (len(ttfts) - 1))],
            "names": stats["names"],
            "bytes": stats["bytes"],
            "decision_s": self.router_s / len(ttfts),  # to choose, and to note the end
        }


def simulate(labels, args):
    """Reports of some policies of the router, `ALL_CACHES` or `ONE_CACHE`, all with all prompts."""
    sizes = {ALL_CACHES: args.cache_tokens * args.replicas, ONE_CACHE: args.cache_tokens}
    takers = {
        label: Cache(sizes[label]) if label in sizes else Routed(label, args) for label in labels
    }
    stride = args.stride if "prefix" in labels else None  # nobody else reads the names
    for prompt in prompts_of(args.replicas, args.prompts, stride, args.seed):
        for taker in takers.values():
            taker.take(prompt)
    return {label: taker.report() for label, taker in takers.items()}


# --- the program ----------------------------------------------------------------------------------


def simulate_all(args):
    """Two processes, as one with the policy prefix takes as long as one with all others."""
    shares, start = [["prefix"], ["round-robin", "random", ALL_CACHES, ONE_CACHE]], time.time()
    spawn = multiprocessing.get_context("spawn")
    # There are millions of objects, and no circles among them.
    with ProcessPoolExecutor(2, spawn, gc.disable) as pool:
        first, others = pool.map(simulate, shares, [args] * 2)
    print_reports(first | others, args)
    print(f"\nAll of it took {time.time() - start:.0f} s.")


def print_reports(reports, args):
    """What clients and replicas get, and what the router costs."""
    print(
        f"{args.prompts:,} prompts, {args.replicas:,} replicas with a cache of "
        f"{args.cache_tokens:,} tokens each\n\n"
        "                        prompt tokens  load of one replica     busy   first\n"
        "                           cached      sent, all   at a time  of the   token\n"
        "                                       max   p99      max      time     p99"
    )
    loads = "{sent_max:11.2f}{sent_p99:6.2f}{outstanding_max:9.2f}{busy:10.0%}"
    for label, report in reports.items():
        line = f"{label:24}{report['hit_rate']:10.1%}"
        if "busy" in report:
            line += loads.format(**report) + f"{report['ttft_p99'] * 1e3:9,.0f} ms"
        print(line)
    router, best = reports["prefix"], reports[ALL_CACHES]["hit_rate"]
    if not (best and router["names"]):
        print("\nThe caches are too small, or the prompts too few: no prefix is remembered.")
        return
    print(
        f"\nOf what all caches in one engine would find, prefix finds "
        f"{router['hit_rate'] / best:.1%}. It remembers\n"
        f"{router['names']:,} names, one for {args.stride} blocks of {BLOCK_SIZE} tokens: "
        f"{router['bytes'] / 1e6:,.1f} MB, {router['bytes'] / router['names']:,.0f} bytes each.\n"
        f"A decision takes {router['decision_s'] * 1e6:,.1f} us, by round-robin "
        f"{reports['round-robin']['decision_s'] * 1e6:,.1f} us."
    )


def main(arguments=None):
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--replicas", type=positive, default=8, metavar="N")
    add("--prompts", type=positive, default=8000, metavar="N", help="of all sessions")
    add("--cache-tokens", type=positive, default=65_536, metavar="N", help="of one replica's cache")
    add("--stride", type=positive, default=8, metavar="N", help="of the router, in blocks")
    add_options(parser, "seed")
    args = parser.parse_args(arguments)
    return ended_in_one_line(lambda: simulate_all(args))


if __name__ == "__main__":
    sys.exit(main())
