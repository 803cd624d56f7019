"""Choose a replica for a prompt: the one that caches its beginning, unless it is clearly busier.

    the prompt's blocks       h0      h1      h2      h3
    known to be cached on     A B C   A B     A       -       A has the longest beginning

The router does not ask the engines. It remembers for each replica the blocks of the prompts that it
has sent there: as many as the replica's cache has, and it forgets the least recently used first, as
caches do. So it may be wrong; then a beginning is computed again. Block hashes are the engine's own
(`m4_prefix_chunked.prefix_cache`): a hash covers all blocks before it, and the `cache_salt`.

Nothing here knows processes, HTTP or tensors. A router is not thread-safe: it is used in one thread
or event loop.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BUSIER = 1.25
"""A replica is clearly busier when its outstanding tokens are above 1.25 times the mean of all
replicas plus one more prompt like this one: `outstanding > 1.25 * mean + num_tokens`.

Without any affinity, a queue varies by a quarter above the mean; we allow at worst twice that, 1.5.
The prompt itself is added because 1.25 times 0 is 0: on idle replicas, two questions about one
document may run at the same time on the replica that caches the document. Tokens count, not
requests: tokens are what a replica computes and keeps in memory."""


@dataclass
class Replica:
    """What the router knows about a replica."""

    name: str
    num_outstanding: int = 0
    """Tokens of the requests that were sent there and have not finished."""
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Hashes of blocks that should be cached there, least recently used first."""

    def num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many of a prompt's blocks, from the first, should be cached there.

        A replica that has a block has those before it (`Router._remember`): known ones come first.
        """
        return bisect_left(block_hashes, True, key=lambda name: name not in self.blocks)

    @property
    def load(self) -> tuple[int, int]:
        """Sort key, least busy first: outstanding tokens, and among equals the fewest remembered
        blocks."""
        return self.num_outstanding, len(self.blocks)


class Router:
    """Chooses a replica for each prompt.

    Call `note_finished` once for every `choose`, however the request ended, unless the replica has
    been removed.

    Args:
        policy: `prefix`, or `round-robin` or `random` for comparison.
        max_blocks: most blocks remembered for one replica: as many as its KV cache has.

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
        """Add a replica. One that was restarted needs another name."""
        assert name not in self._replicas, f"replica {name!r} is there already"
        self._replicas[name] = Replica(name)

    def remove(self, name: str) -> None:
        """Forget a replica and its cache."""
        del self._replicas[name]

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, in the order in which they were added."""
        return list(self._replicas)

    # -- requests come and go ----------------------------------------------------------------

    def choose(self, block_hashes: Sequence[bytes], num_tokens: int) -> str:
        """Return the name of the replica that gets a prompt.

        Args:
            block_hashes: hashes of the prompt's full blocks, in order: `hash_blocks(...)`.
            num_tokens: tokens of the request: its prompt's, and those it may generate.

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
        """Note that a request has ended. Does nothing if its replica has been removed.

        Args:
            num_tokens: the same number that `choose` got.
        """
        if (replica := self._replicas.get(name)) is not None:
            assert num_tokens <= replica.num_outstanding, "more has finished than was sent there"
            replica.num_outstanding -= num_tokens

    def num_outstanding(self, name: str) -> int:
        """Return the tokens of the requests that were sent to a replica and have not finished."""
        return self._replicas[name].num_outstanding

    def num_cached(self, name: str, block_hashes: Sequence[bytes]) -> int:
        """Return how many of a prompt's blocks, from the first, should be cached on a replica."""
        return self._replicas[name].num_cached(block_hashes)

    # -- policies ----------------------------------------------------------------------------

    def _by_prefix(self, block_hashes: Sequence[bytes], num_tokens: int) -> Replica:
        """Return a replica with the longest cached beginning, without those that are clearly
        busier."""
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
        """Remember that the prompt's blocks will be cached on the replica; forget the oldest if too
        many.

        Blocks are added last to first: each is then older than those before it, and goes first.
        """
        for block_hash in reversed(block_hashes[: self._max_blocks]):
            replica.blocks[block_hash] = None
            replica.blocks.move_to_end(block_hash)
        while len(replica.blocks) > self._max_blocks:
            replica.blocks.popitem(last=False)
