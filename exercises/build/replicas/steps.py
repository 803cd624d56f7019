"""The steps of the router's course: what it remembers, whom it chooses, and whom not."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from exercises.build.check import Parts, Wrong, step
from exercises.build.session import session
from exercises.build.skeleton import File, Todo
from milestone_llm.serving.replicas import router as ours

MILESTONE = "milestone_llm.serving.replicas"
TITLE = "replicas: the router in front of them (1 hour)"
DONE = """All of it. Ours is milestone_llm/serving/replicas/router.py; it routes for real:

  python -m docs.questions.scale_simulation
  python -m m4_prefix_chunked.serve --replicas 2      needs Ray, see docs/scale.md"""

FILES = [
    File(
        "milestone_llm/serving/replicas/router.py",
        {
            "Replica.num_cached": "step 1: count block_hashes from the first on, up to the first "
            "that is not in self.blocks.",
            "Router._remember": "step 1: put the prompt's blocks into replica.blocks, the last "
            "first; one that is there moves to the end. Too many: popitem(last=False).",
            "Router._by_prefix": Todo(
                "step 2: the replica with the most cached blocks; among equals the least "
                "`load`, which is a sort key. Step 3: those whose num_outstanding is above "
                "BUSIER * mean + num_tokens are not asked."
            ),
        },
        """You write what raises NotImplementedError:

    python -m exercises.build replicas         what to write next, and what is wrong with it

`choose` and `note_finished` call your parts, and count `num_outstanding`.""",
    )
]


@step("what a replica should have cached", "router.py")
def memory(parts: Parts) -> None:
    """`_remember` notes which blocks a prompt leaves on a replica, and forgets the oldest.
    `num_cached` counts the blocks of a prompt's beginning that are there."""
    session(
        """
        >>> a = Replica("a")
        >>> router._remember(a, ["1", "12", "123"])
        >>> list(a.blocks)  # the last block of a prompt is the oldest: without those before it, it
        ... # is of no use, so it goes first.
        ['123', '12', '1']
        >>> a.num_cached(["1", "12", "129"])  # two blocks from the first on.
        2
        >>> a.num_cached(["9", "91"])  # another first block: nothing of it is cached.
        0
        >>> router._remember(a, ["1", "17"])
        >>> list(a.blocks)  # block 1 was used again: it moves to the end.
        ['123', '12', '17', '1']
        >>> router._remember(a, ["8"])
        >>> list(a.blocks)  # max_blocks=4: the least recently used is forgotten.
        ['12', '17', '1', '8']
        >>> a.num_cached(["1", "12", "123"])  # block 123 is forgotten.
        2
        >>> router._remember(a, ["5", "55", "555", "5555", "55555"])
        >>> list(a.blocks)  # of a prompt that is longer than the cache the beginning stays.
        ['5555', '555', '55', '5']
        """,
        Replica=parts.Replica,
        router=parts.Router(max_blocks=4),
    )


def router_of(parts: Any, *names: str) -> Any:
    """A router with these replicas."""
    router = parts.Router()
    for name in names:
        router.add(name)
    return router


@step("the longest beginning, then the least work", "router.py")
def affinity(parts: Parts) -> None:
    """`_by_prefix` returns the replica that has most of the prompt's beginning. Among equals it is
    the one with the fewest outstanding tokens, and then the one with the fewest blocks."""
    session(
        """
        >>> router.choose(["A", "AA"], 64)  # all are idle and empty: the first.
        'a'
        >>> router.choose(["B", "BB"], 64)  # nobody has it; a has 64 tokens to do.
        'b'
        >>> router.note_finished("a", 64)
        >>> router.choose(["A", "AA", "AAA"], 96)  # a has two of its blocks.
        'a'
        >>> router.note_finished("a", 96)
        >>> router.note_finished("b", 64)
        >>> router.choose(["C"], 32)  # all are idle; c remembers the fewest blocks.
        'c'
        >>> router.choose(["A", "AB"], 48)  # a has one of its blocks, the others none.
        'a'
        """,
        router=router_of(parts, "a", "b", "c"),
    )


@step("unless it is clearly busier", "router.py")
def load(parts: Parts) -> None:
    """Now `_by_prefix` leaves out who has more than `BUSIER` times the mean of all replicas'
    outstanding tokens, plus those of this request."""
    session(
        """
        >>> [router.choose(["A", "AA"], 80) for _ in range(2)]  # a has the beginning. Before the
        ... # second, the limit is 1.25 * 80 / 3 + 80 = 113, and a has 80.
        ['a', 'a']
        >>> router.choose(["A", "AA"], 80)  # a has 160, and the limit is 1.25 * 160 / 3 + 80 = 147.
        'b'
        >>> router.choose(["A", "AA"], 80)  # a: 160, b: 80; the limit is 180. Both have all of it,
        ... # and b less work.
        'b'
        >>> router.choose(["A", "AA"], 20)  # 160 each, 0; the limit is 153. Only c is left.
        'c'
        """,
        router=router_of(parts, "a", "b", "c"),
    )


BLOCK, ANSWER, SPEED, NUM_PROMPTS = 16, 64, 30, 600
"""Tokens of a block, of an answer, tokens a replica computes between two prompts; prompts."""


def prompts() -> list[list[bytes]]:
    """Hashes of the blocks of prompts: a document of eight, some asked about often, a question."""
    draw = random.Random(0)
    weights = [(1 + rank) ** -1.5 for rank in range(40)]
    documents = draw.choices(range(40), weights, k=NUM_PROMPTS)
    return [
        [b"%d, %d" % (document, block) for block in range(8)] + [b"question %d" % number]
        for number, document in enumerate(documents)
    ]


def simulate(router: Any) -> tuple[list[str], float, int]:
    """Return the replica of each prompt, the share of blocks that were cached there, and the
    longest queue, in tokens. A replica caches what the router remembers."""
    names = "abcd"
    queues: dict[str, deque[list[int]]] = {name: deque() for name in names}
    for name in names:
        router.add(name)
    chosen, num_cached, longest, asked = [], 0, 0, prompts()
    for hashes in asked:
        cached = {name: router.num_cached(name, hashes) for name in names}
        num_tokens = len(hashes) * BLOCK + ANSWER
        chosen.append(router.choose(hashes, num_tokens))
        num_cached += cached[chosen[-1]]
        work = (len(hashes) - cached[chosen[-1]]) * BLOCK + ANSWER
        queues[chosen[-1]].append([work, num_tokens])
        longest = max(longest, *(sum(left for left, _ in queue) for queue in queues.values()))
        for name, queue in queues.items():
            speed = SPEED
            while queue and speed:
                done = min(speed, queue[0][0])
                queue[0][0] -= done
                speed -= done
                if not queue[0][0]:
                    router.note_finished(name, queue.popleft()[1])
    return chosen, num_cached / sum(map(len, asked)), longest


class Longest(ours.Router):
    """Sends a prompt to the longest beginning, however busy that replica is."""

    def _by_prefix(self, block_hashes: Any, num_tokens: int) -> ours.Replica:
        replicas = self._replicas.values()
        return min(replicas, key=lambda each: (-each.num_cached(block_hashes), each.load))


@step("hits and queues", "router.py")
def traffic(parts: Parts) -> None:
    """Nothing new to write: 600 prompts about 40 documents, some of them popular, on four replicas.
    Your router finds as much in their caches as ours, and its queues are no longer."""
    routers = {
        "yours": parts.Router(max_blocks=80),
        "ours": ours.Router(max_blocks=80),
        "longest beginning alone": Longest(max_blocks=80),
        "round robin": ours.Router("round-robin", max_blocks=80),
    }
    results = {name: simulate(router) for name, router in routers.items()}
    table = "\n".join(
        f"{name:26}{hits:6.1%}{longest:12,} tokens" for name, (_, hits, longest) in results.items()
    )
    yours, right = results["yours"][0], results["ours"][0]
    if yours != right:
        first = next(
            at for at, pair in enumerate(zip(yours, right, strict=True)) if len({*pair}) > 1
        )
        raise Wrong(
            f"{'':26}cached   longest queue\n{table}\n\n"
            f"Prompt {first} goes to {yours[first]}, with ours to {right[first]}."
        )
