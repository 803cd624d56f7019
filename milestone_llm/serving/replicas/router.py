"""Which replica gets a prompt: where its beginning is cached, unless that one is clearly busier.

    the prompt's blocks       h0      h1      h2      h3
    known to be cached on     A B C   A B     A       -       the longest: A? B? C? anybody?

The router asks no engine. It remembers the blocks of the prompts that it has sent where, as many
for a replica as the replica's cache has, and forgets the least recently used first, as caches do.
So it may be wrong, and then a beginning is computed once more. The names of the blocks are the
engine's own (`m4_prefix_chunked.prefix_cache`): a hash covers all that came before, and the
`cache_salt`.

Nothing here knows of processes, HTTP or tensors. It is not thread-safe: one thread or event loop
owns a router.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BUSIER = 1.25
"""A replica is clearly busier when its outstanding tokens are above 1.25 times the mean of all
replicas and one more prompt like this one: `outstanding > 1.25 * mean + num_tokens`.

A queue varies by a quarter above the mean without any affinity; we allow at worst twice that, 1.5.
The prompt itself is added because 1.25 times nothing is nothing: on idle replicas two questions to
one document may run side by side where the document is. Tokens count, not requests: they are what a
replica computes and keeps in memory."""


@dataclass
class Replica:
    """What the router knows of a replica."""

    name: str
    num_outstanding: int = 0
    """Tokens of the requests that were sent there and have not finished."""
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Names of blocks that should be cached there, least recently used first."""

    def num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first, should be cached there.

        Who has a block has those before it (`Router._remember`): known blocks come first.
        """
        return bisect_left(block_hashes, True, key=lambda name: name not in self.blocks)

    @property
    def load(self) -> tuple[int, int]:
        """The least comes first: outstanding tokens, and among equals who has most room."""
        return self.num_outstanding, len(self.blocks)


class Router:
    """Chooses replicas.

    Every `choose` is to be followed by one `note_finished`, however the request ended, unless the
    replica has been removed.

    Args:
        policy: `prefix`, or `round-robin` or `random` for comparison.
        max_blocks: most blocks that are remembered of one replica: as many as its KV cache has.

    Raises:
        ValueError: an unknown policy.
    """

    def __init__(self, policy: str = "prefix", max_blocks: int = 4096) -> None:
        choosers: dict[str, Callable[[Sequence[bytes], int], Replica]] = {
            "prefix": self._by_prefix,
            "round-robin": self._in_turn,
            "random": self._at_random,
        }
        if policy not in choosers:
            raise ValueError(f"policy must be one of {', '.join(choosers)}, got {policy!r}")
        self._choose = choosers[policy]
        self._max_blocks = max_blocks
        self._random = random.Random(0)
        self._num_chosen = 0
        self._replicas: dict[str, Replica] = {}

    # -- replicas come and go ----------------------------------------------------------------

    def add(self, name: str) -> None:
        """A replica can be chosen from now on. One that was restarted needs another name."""
        assert name not in self._replicas, f"replica {name!r} is there already"
        self._replicas[name] = Replica(name)

    def remove(self, name: str) -> None:
        """A replica has gone, and its cache with it."""
        del self._replicas[name]

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, in the order in which they came."""
        return list(self._replicas)

    # -- requests come and go ----------------------------------------------------------------

    def choose(self, block_hashes: Sequence[bytes], num_tokens: int) -> str:
        """The replica that gets a prompt.

        Args:
            block_hashes: names of the prompt's full blocks, in order: `hash_blocks(...)`.
            num_tokens: tokens that the request brings: its prompt's, and those it may generate.

        Raises:
            LookupError: there is no replica.
        """
        if not self._replicas:
            raise LookupError("there is no replica to choose")
        replica = self._choose(block_hashes, num_tokens)
        self._remember(replica, block_hashes)
        self._num_chosen += 1
        replica.num_outstanding += num_tokens
        return replica.name

    def note_finished(self, name: str, num_tokens: int) -> None:
        """A request has ended. Nothing happens if its replica has been removed meanwhile.

        Args:
            num_tokens: what `choose` was told.
        """
        if (replica := self._replicas.get(name)) is not None:
            assert num_tokens <= replica.num_outstanding, "more has finished than was sent there"
            replica.num_outstanding -= num_tokens

    def num_outstanding(self, name: str) -> int:
        """Tokens of the requests that were sent to a replica and have not finished."""
        return self._replicas[name].num_outstanding

    def num_cached(self, name: str, block_hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first, should be cached on a replica."""
        return self._replicas[name].num_cached(block_hashes)

    # -- policies ----------------------------------------------------------------------------

    def _by_prefix(self, block_hashes: Sequence[bytes], num_tokens: int) -> Replica:
        """Of those that are not clearly busier, one with the longest beginning."""
        replicas = self._replicas.values()
        mean = sum(each.num_outstanding for each in replicas) / len(replicas)
        most = BUSIER * mean + num_tokens
        others = [each for each in replicas if each.num_outstanding <= most]
        return min(others, key=lambda each: (-each.num_cached(block_hashes), each.load))

    def _in_turn(self, block_hashes: Sequence[bytes], num_tokens: int) -> Replica:
        return list(self._replicas.values())[self._num_chosen % len(self._replicas)]

    def _at_random(self, block_hashes: Sequence[bytes], num_tokens: int) -> Replica:
        return self._random.choice(list(self._replicas.values()))

    # -- what it remembers -------------------------------------------------------------------

    def _remember(self, replica: Replica, block_hashes: Sequence[bytes]) -> None:
        """The prompt's blocks will be cached on the replica, and older ones may have to go.

        The last comes first, so that a block is always older than those before it and goes first.
        """
        for block_hash in reversed(block_hashes[: self._max_blocks]):
            replica.blocks[block_hash] = None
            replica.blocks.move_to_end(block_hash)
        while len(replica.blocks) > self._max_blocks:
            replica.blocks.popitem(last=False)
