"""How many hits do N caches have, compared with one large cache, and how even is the load?

The router is the real one. Clients hold conversations of three turns on average: a system prompt
of 640 tokens, drawn by Zipf's law, and in each turn a question of 128 and an answer of 256. A
replica is only a prefix cache; a request has ended when four more for each replica have come.
"""

import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterator

from milestone_llm.serving.replicas.router import Router

NUM_REPLICAS, NUM_PROMPTS = 8, 8000
BLOCK_SIZE, CACHE_BLOCKS = 64, 1024
SYSTEM, QUESTION, ANSWER = 10, 2, 4  # blocks
SYSTEMS, SESSIONS, AT_A_TIME = 10, 50, 4  # for each replica: prompts, open sessions, requests


def prompts() -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield the hashes of each prompt's blocks, and those with the answer's blocks after them."""
    draw = random.Random(0)
    systems = range(SYSTEMS * NUM_REPLICAS)
    weights = [1 / (1 + rank) for rank in systems]
    owners = iter(draw.choices(systems, weights, k=NUM_PROMPTS))
    sessions: list[list[bytes]] = [[] for _ in range(SESSIONS * NUM_REPLICAS)]
    for number in range(NUM_PROMPTS):
        at = draw.randrange(len(sessions))
        if not sessions[at] or draw.random() < 1 / 3:  # a new session begins
            owner = next(owners)
            sessions[at] = [b"system %d, %d" % (owner, block) for block in range(SYSTEM)]
        new = [b"turn %d, %d" % (number, block) for block in range(QUESTION + ANSWER)]
        prompt = sessions[at] + new[:QUESTION]
        sessions[at] = sessions[at] + new
        yield prompt, sessions[at]


class Cache:
    """A prefix cache of a fixed number of blocks, which drops the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.num_asked = self.num_found = 0

    def take(self, prompt: list[bytes], whole: list[bytes]) -> None:
        """Look up a prompt's beginning, then remember all of it and its answer."""
        missing = (place for place, name in enumerate(prompt) if name not in self.blocks)
        self.num_found += next(missing, len(prompt))
        self.num_asked += len(prompt)
        for name in reversed(whole):  # so that a block goes before those on which it depends
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        while len(self.blocks) > self.num_blocks:
            self.blocks.popitem(last=False)


def simulate(policy: str) -> tuple[float, float]:
    """Return the share of prompt tokens found, and the most blocks of a replica relative to the
    mean."""
    front = Router(policy, max_blocks=CACHE_BLOCKS)
    caches = {f"r{number}": Cache(CACHE_BLOCKS) for number in range(NUM_REPLICAS)}
    for name in caches:
        front.add(name)
    running: deque[tuple[str, int]] = deque()
    for prompt, whole in prompts():
        if len(running) == AT_A_TIME * NUM_REPLICAS:
            front.note_finished(*running.popleft())
        num_tokens = len(whole) * BLOCK_SIZE
        name = front.choose(prompt, num_tokens)
        running.append((name, num_tokens))
        caches[name].take(prompt, whole)
    sent = [cache.num_asked for cache in caches.values()]
    found = sum(cache.num_found for cache in caches.values()) / sum(sent)
    return found, max(sent) / statistics.mean(sent)


print(f"{NUM_PROMPTS:,} prompts, {NUM_REPLICAS} replicas with a cache of 65,536 tokens each\n")
print("                        prompt tokens    most sent to one,")
print("                           cached          of the mean")
for policy in ("prefix", "round-robin", "random"):
    found, most = simulate(policy)
    print(f"{policy:24}{found:10.1%}{most:18.2f}")
for what, num_caches in (("all caches", NUM_REPLICAS), ("one cache", 1)):
    one = Cache(num_caches * CACHE_BLOCKS)
    for prompt, whole in prompts():
        one.take(prompt, whole)
    print(f"one engine, {what:12}{one.num_found / one.num_asked:10.1%}")
