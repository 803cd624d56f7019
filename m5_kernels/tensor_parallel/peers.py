"""Keeps one engine's requests the same on all ranks, so that all plan the same steps.

Rank 0's engine is asked for requests. The others learn of them before the next step, from rank 0,
and make the same requests: equal ids, numbers and seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

from .ranks import Ranks


class Order(NamedTuple):
    """What an engine was asked for: a new request, or the end of one (then without a prompt)."""

    request_id: str
    prompt_token_ids: tuple[int, ...] | None = None
    params: SamplingParams | None = None
    priority: int = 0
    arrival: int = 0


class Peers:
    """Keeps one engine's requests the same on all ranks; the step loop asks it before each step.

    Args:
        make: a request from an order of rank 0.
    """

    def __init__(self, ranks: Ranks, number: int, make: Callable[[Order], Request]) -> None:
        self.ranks, self.number = ranks, number
        self._make = make
        self._orders: list[Order] = []

    def note_added(self, request: Request) -> None:
        """This rank's engine was asked for a request."""
        prompt = tuple(request.prompt_token_ids)
        order = Order(
            request.request_id, prompt, request.sampling_params, request.priority, request.arrival
        )
        self._orders.append(order)

    def note_aborted(self, request_id: str) -> None:
        """It was asked to end one."""
        self._orders.append(Order(request_id))

    def agree(self, call: str) -> Iterator[Request | str]:
        """Before a step, or whatever `call` is: what rank 0 was asked for and this rank was not.

        Yields:
            Requests to add, and ids of those to end, in their order.

        Raises:
            RuntimeError: this rank was asked for something else.
        """
        own = self._orders
        theirs = self.ranks.exchange(call, self.number, own)
        if own and own != theirs:
            pairs = itertools.zip_longest(own, theirs)
            mine, of_rank_0 = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(
                f"rank {self.ranks.rank} was asked for {mine} where rank 0 was asked for "
                f"{of_rank_0}: make the same calls on all ranks, or only on rank 0"
            )
        if not own:
            for order in theirs:
                is_end = order.prompt_token_ids is None
                yield order.request_id if is_end else self._make(order)
        self._orders = []

    def part(self) -> None:
        """A step was interrupted."""
        self.ranks.part()
