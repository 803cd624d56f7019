"""Which replica gets a prompt: where its beginning is cached, unless that one is clearly busier.

    the prompt's blocks       h0      h1      h2      h3
    known to be cached on     A B C   A B     A       -       from the deepest: A? B? C? anybody?

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
import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

BUSIER = 1.25
"""A replica is clearly busier when its outstanding tokens are above 1.25 times the mean of all
replicas and one more prompt like this one: `outstanding > 1.25 * mean + num_tokens`.

A queue varies by a quarter above the mean without any affinity; we allow at worst twice that, 1.5.
The prompt itself is added because 1.25 times nothing is nothing: on idle replicas two questions to
one document may run side by side where the document is. Tokens count, not requests: they are what a
replica computes and keeps in memory."""


@dataclass(eq=False, slots=True)
class Replica:
    """What the router knows of a replica."""

    name: str
    num_outstanding: int = 0
    """Tokens of the requests that were sent there and have not finished."""
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Names of blocks that should be cached there, least recently used first."""
    rank: int = 0
    """The least comes first: outstanding tokens, and among equals who has most room in its cache.
    One number, and kept up to date, because it is compared far more often than it changes."""
    alone: tuple[Replica, ...] = ()
    """The replica, as the only holder of a block: most blocks have one, and share this tuple."""

    def __post_init__(self) -> None:
        self.alone = (self,)

    def note_tokens(self, num_tokens: int) -> None:
        """So many tokens more are outstanding, or fewer."""
        self.num_outstanding += num_tokens
        self.rank = (self.num_outstanding << 32) + len(self.blocks)


class Router:
    """Chooses replicas.

    Every `choose` is to be followed by one `note_finished`, however the request ended, unless the
    replica has been removed.

    Args:
        policy: one of `POLICIES`: `prefix`, or `round-robin` or `random` for comparison.
        max_blocks: most blocks that are remembered of one replica: as many as its KV cache has.
        stride: remember each `stride`-th block only. Its name stands for those before it, so a
            router of `stride` 8 finds beginnings in units of 8 blocks, in an eighth of the memory.
        seed: of the policy `random`.

    Raises:
        ValueError: an unknown policy, or a number below 1.
    """

    def __init__(
        self, policy: str = "prefix", max_blocks: int = 4096, stride: int = 1, seed: int = 0
    ) -> None:
        choosers: dict[str, Callable[[Sequence[bytes], int], Replica]] = {
            "prefix": self._by_prefix,
            "round-robin": self._in_turn,
            "random": self._at_random,
        }
        if policy not in choosers:
            raise ValueError(f"policy must be one of {', '.join(choosers)}, got {policy!r}")
        if stride < 1 or max_blocks < stride:
            raise ValueError(f"1 <= stride <= max_blocks, got {stride} and {max_blocks}")
        self.policy = policy
        self.stride = stride
        self.max_names = max_blocks // stride
        """Most names that are remembered of one replica."""
        self._choose = choosers[policy]
        self._random = random.Random(seed)
        self._num_chosen = 0
        self._num_outstanding = 0
        self._replicas: dict[str, Replica] = {}
        self._order: list[Replica] = []
        self._holders: dict[bytes, tuple[Replica, ...]] = {}
        """By name of a block: where it should be cached."""

    # -- replicas come and go ----------------------------------------------------------------

    def add(self, name: str) -> None:
        """A replica can be chosen from now on. One that was restarted needs another name.

        Raises:
            ValueError: a replica of this name is there.
        """
        if name in self._replicas:
            raise ValueError(f"replica {name!r} is there already; remove it first")
        self._replicas[name] = Replica(name)
        self._order = list(self._replicas.values())

    def remove(self, name: str) -> None:
        """A replica has gone, and its cache with it.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self._replicas:
            raise ValueError(f"there is no replica {name!r}; there are {self.replicas}")
        replica = self._replicas.pop(name)
        self._order = list(self._replicas.values())
        self._num_outstanding -= replica.num_outstanding
        for block_hash in replica.blocks:
            self._drop_holder(block_hash, replica)

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, in the order in which they came."""
        return list(self._replicas)

    def num_outstanding(self, name: str) -> int:
        """Tokens of the requests that were sent to a replica and have not finished."""
        return self._replicas[name].num_outstanding

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
        names = block_hashes[self.stride - 1 :: self.stride]
        replica = self._choose(names, num_tokens)
        if self.policy == "prefix":
            self._remember(replica, names)
        self._num_chosen += 1
        self._num_outstanding += num_tokens
        replica.note_tokens(num_tokens)
        return replica.name

    def note_finished(self, name: str, num_tokens: int) -> None:
        """A request has ended. Nothing happens if its replica has been removed meanwhile.

        Args:
            num_tokens: what `choose` was told.

        Raises:
            ValueError: more has finished than was sent there.
        """
        replica = self._replicas.get(name)
        if replica is None:
            return
        if num_tokens > replica.num_outstanding:
            message = f"{num_tokens} tokens finished on {name!r}, which has "
            raise ValueError(f"{message}{replica.num_outstanding} outstanding")
        self._num_outstanding -= num_tokens
        replica.note_tokens(-num_tokens)

    # -- what it knows and costs -------------------------------------------------------------

    def num_cached(self, name: str, block_hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first, should be cached on a replica."""
        replica, num_names = self._replicas[name], 0
        for block_hash in block_hashes[self.stride - 1 :: self.stride]:
            if block_hash not in replica.blocks:
                break
            num_names += 1
        return num_names * self.stride

    def stats(self) -> dict[str, int]:
        """Replicas, decisions, outstanding tokens; names remembered, and their bytes of memory.

        `names` counts a name once for each replica that has it, `distinct_names` once.
        """
        num_names = sum(len(replica.blocks) for replica in self._order)
        num_bytes = sys.getsizeof(self._holders) + len(self._holders) * sys.getsizeof(bytes(32))
        num_bytes += sum(sys.getsizeof(replica.blocks) for replica in self._order)
        num_bytes += (num_names - len(self._holders)) * sys.getsizeof((None,))  # of tuples, at most
        return {
            "replicas": len(self._order),
            "chosen": self._num_chosen,
            "outstanding_tokens": self._num_outstanding,
            "names": num_names,
            "distinct_names": len(self._holders),
            "bytes": num_bytes,
        }

    # -- policies ----------------------------------------------------------------------------

    def _by_prefix(self, names: Sequence[bytes], num_tokens: int) -> Replica:
        """Of those that are not clearly busier, one with the longest beginning."""
        most = BUSIER * self._num_outstanding / len(self._order) + num_tokens
        # Who has a block has those before it (`_remember`): known blocks come first, and a holder
        # is looked at once, at the deepest of its blocks.
        holders_of, num_asked = self._holders, 0
        num_known = bisect_left(names, True, key=lambda name: name not in holders_of)
        for depth in reversed(range(num_known)):
            holders = holders_of[names[depth]]
            if len(holders) > num_asked:
                num_asked = len(holders)
                replica = min(holders, key=attrgetter("rank"))
                if replica.num_outstanding <= most:
                    return replica
        return min(self._order, key=attrgetter("rank"))

    def _in_turn(self, names: Sequence[bytes], num_tokens: int) -> Replica:
        return self._order[self._num_chosen % len(self._order)]

    def _at_random(self, names: Sequence[bytes], num_tokens: int) -> Replica:
        return self._random.choice(self._order)

    # -- books -------------------------------------------------------------------------------

    def _remember(self, replica: Replica, names: Sequence[bytes]) -> None:
        """The prompt's blocks will be cached on the replica, and older ones may have to go.

        The last comes first, so that a block is always older than those before it and goes first.
        """
        blocks = replica.blocks
        for block_hash in reversed(names[: self.max_names]):
            if block_hash in blocks:
                blocks.move_to_end(block_hash)
            else:
                blocks[block_hash] = None
                self._holders[block_hash] = self._holders.get(block_hash, ()) + replica.alone
        while len(blocks) > self.max_names:
            self._drop_holder(blocks.popitem(last=False)[0], replica)

    def _drop_holder(self, block_hash: bytes, replica: Replica) -> None:
        holders = self._holders[block_hash]
        if len(holders) == 1:
            del self._holders[block_hash]
        else:
            self._holders[block_hash] = tuple(each for each in holders if each is not replica)
