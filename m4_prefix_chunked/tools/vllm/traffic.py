"""Traffic for two schedulers: limits, requests and aborts, random or written down.

A written script is JSON. A prompt is named by its blocks, as in the golden plans: "AB2" is the
block A, the block B and two tokens that no other prompt has.

    {"limits": {"block_size": 4, "num_blocks": 9},
     "requests": [{"step": 0, "name": "a", "prompt": "AB2", "max_tokens": 3}],
     "aborts": {"2": ["a"]}}
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from milestone_llm.core.errors import InputError

STOP_TOKEN_IDS = (11, 12, 13)
FIRST_PROMPT_TOKEN = 100
"""Tokens of prompts begin here; sampled ones are below. None is above 255."""


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """Return what the made-up model says: it depends on all tokens, and on the completion."""
    return 10 + zlib.crc32(bytes(tokens), seed) % 90


def guesses(tokens: Sequence[int], seed: int, most: int) -> list[int]:
    """Return draft tokens as the made-up proposer makes them: none to `most`, some wrong."""
    lot, drafts = zlib.crc32(bytes(tokens), 7), list[int]()
    for place in range(lot % (most + 1)):
        is_wrong = (lot >> (3 + place)) % 4 == 0
        drafts.append(9 if is_wrong else next_token([*tokens, *drafts], seed))
    return drafts


@dataclass
class Limits:
    """Limits and switches that both schedulers have. All but blocks have M4's names."""

    block_size: int = 4
    num_blocks: int = 16
    """Blocks to give out. vLLM has one more, its null block."""
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_model_len: int = 32
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_speculative_tokens: int = 0
    """Draft tokens of a row; 0: no speculation."""
    is_ahead: bool = False
    """Whether a step is planned before the tokens of the one before are known: M5's pipelined
    steps, and vLLM's `AsyncScheduler`."""


@dataclass
class Arrival:
    """A request that comes before the given step."""

    step: int
    name: str
    tokens: list[int]
    max_tokens: int = 1
    priority: int = 0
    n: int = 1
    salt: str = ""
    has_prompt_logprobs: bool = False


@dataclass
class Traffic:
    """What two schedulers are given."""

    limits: Limits
    arrivals: list[Arrival]
    aborts: dict[int, list[str]] = field(default_factory=dict)
    """Names of requests that are aborted before the given step."""


def written(script: Mapping[str, Any]) -> Traffic:
    """Return the traffic of a script.

    Raises:
        InputError: a limit or a field of a request does not exist.
    """
    known = {each.name for each in fields(Limits)}
    if unknown := set(script.get("limits", ())) - known:
        raise InputError(f"no such limit: {', '.join(sorted(unknown))}; there are {sorted(known)}")
    limits = Limits(**script.get("limits", {}))
    arrivals = []
    for each in script["requests"]:
        rest = {name: value for name, value in each.items() if name != "prompt"}
        tokens = prompt(each["prompt"], each["name"], limits.block_size)
        try:
            arrivals.append(Arrival(**{"step": 0, **rest}, tokens=tokens))
        except TypeError as error:
            raise InputError(f"request {each['name']}: {error}") from None
    aborts = {int(step): list(names) for step, names in script.get("aborts", {}).items()}
    return Traffic(limits, arrivals, aborts)


def prompt(text: str, name: str, block_size: int) -> list[int]:
    """Return the tokens of "AB2": two named blocks, and two tokens of this request alone."""
    blocks = text.rstrip("0123456789")
    num_own = int(text[len(blocks) :] or 0)
    words = [f"{block}:{i}" for block in blocks for i in range(block_size)]
    words += [f"{blocks}/{name}:{i}" for i in range(num_own)]
    return [FIRST_PROMPT_TOKEN + zlib.crc32(word.encode()) % 150 for word in words]


def draw(seed: int, **fixed: Any) -> Traffic:
    """Return random limits and traffic that make trouble: few blocks, shared beginnings, blocks
    behind two beginnings, chats that go on, salts, aborts.

    Args:
        fixed: limits that are not random. With `n` requests have up to so many completions.
    """
    rng = random.Random(seed)
    most_completions = fixed.pop("n", 1)
    size = rng.choice([2, 4, 8])
    is_chunked = fixed.get("enable_chunked_prefill", rng.random() < 0.8)
    max_model_len = size * rng.randint(4, 12)
    max_num_seqs = rng.randint(most_completions, 5 + most_completions)
    budget = rng.randint(max(2, max_num_seqs // 2), 3 * size * 4)
    if not is_chunked:
        budget = max(max_model_len, max_num_seqs) + rng.randint(0, max_model_len)
    least = max_model_len // size
    limits = Limits(
        block_size=size,
        num_blocks=rng.randint(least, 3 * least),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        long_prefill_token_threshold=(
            rng.randint(1, 2 * size) if is_chunked and rng.random() < 0.3 else 0
        ),
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.7,
        enable_chunked_prefill=is_chunked,
    )
    limits = replace(limits, **fixed)
    arrivals = _arrivals(rng, limits, most_completions)
    aborts: dict[int, list[str]] = {}
    for each in arrivals:
        if rng.random() < 0.08:
            aborts.setdefault(each.step + rng.randint(1, 10), []).append(each.name)
    return Traffic(limits, arrivals, aborts)


def _arrivals(rng: random.Random, limits: Limits, most_completions: int) -> list[Arrival]:
    def some(most: int) -> list[int]:
        return [rng.randrange(FIRST_PROMPT_TOKEN, 250) for _ in range(rng.randint(0, most))]

    size, longest = limits.block_size, limits.max_model_len
    heads = [[rng.randrange(FIRST_PROMPT_TOKEN, 250) for _ in range(longest)] for _ in range(3)]
    block = heads[0][:size]
    said: list[list[int]] = []
    arrivals, step = [], 0
    for index in range(rng.randint(2, 20)):
        step += rng.choice([0, 0, 1, 1, 2, 5])
        chance = rng.random()
        if said and chance < 0.25:  # a chat goes on
            tokens = list(rng.choice(said))
            for _ in range(rng.randint(0, 2 * size)):
                tokens.append(next_token(tokens))
            tokens += some(size)
        elif chance < 0.4:  # one block behind two beginnings
            tokens = [*rng.choice(heads)[:size], *block, *some(size)]
        else:
            tokens = rng.choice(heads)[: rng.randint(0, 3 * size)] + some(2 * size)
        tokens = (tokens or [FIRST_PROMPT_TOKEN])[: longest - 1]
        said.append(tokens)
        arrivals.append(
            Arrival(
                step,
                f"r{index}",
                tokens,
                rng.randint(1, 3 * size),
                priority=rng.randint(0, 2),
                n=rng.randint(1, most_completions),
                salt=rng.choice(["", "", "", "other"]),
                has_prompt_logprobs=rng.random() < 0.05,
            )
        )
    return arrivals


def simpler(traffic: Traffic) -> Iterator[Traffic]:
    """Yield traffics that are a little simpler than this one: one request fewer, one number
    smaller."""
    for index in range(len(traffic.arrivals) if len(traffic.arrivals) > 1 else 0):
        one = deepcopy(traffic)
        del one.arrivals[index]
        yield one
    if traffic.aborts:
        yield replace(deepcopy(traffic), aborts={})
    for index, each in enumerate(traffic.arrivals):
        before = traffic.arrivals[index - 1].step if index else 0
        smaller: list[dict[str, Any]] = [
            {"step": max(before, 0)},
            {"step": each.step - 1},
            {"priority": 0},
            {"max_tokens": 1},
            {"max_tokens": each.max_tokens - 1},
            {"n": each.n - 1},
            {"salt": ""},
            {"has_prompt_logprobs": False},
            {"tokens": each.tokens[: len(each.tokens) // 2]},
            {"tokens": each.tokens[:-1]},
        ]
        for change in smaller:
            new = replace(each, **change)
            if new != each and new.step >= before and new.max_tokens and new.n and new.tokens:
                one = deepcopy(traffic)
                one.arrivals[index] = new
                yield one
    now = traffic.limits
    for change in (
        {"policy": "fcfs"},
        {"long_prefill_token_threshold": 0},
        {"enable_prefix_caching": False},
        {"num_blocks": now.num_blocks - 1},
        {"max_num_seqs": now.max_num_seqs - 1},
        {"max_model_len": now.max_model_len - now.block_size},
        {"max_num_batched_tokens": now.max_num_batched_tokens - 1},
    ):
        limits = replace(now, **change)
        if limits != now and min(limits.num_blocks, limits.max_num_seqs) > 0:
            yield replace(deepcopy(traffic), limits=limits)
