"""Further completions of a prompt (n > 1). The prompt is computed once, and they start from its KV.

    r0      P P P P | d d d d         the first completion computes the prompt
    r0/1            | d d d           from then on the others share its blocks, and copy what they
    r0/2            | d d d d d       write into

Completions of a prompt come together: with the same `arrival`, the first with `index` 0. Until the
first has computed the prompt, the others have no memory and are in no queue. Completions need a KV
cache in which requests can share memory: they exist from m3_paged on.
"""

from __future__ import annotations

from collections.abc import Iterable

from .request import Request


class Completions:
    """Keeps the completions that have not started."""

    def __init__(self) -> None:
        self.further: dict[Request, list[Request]] = {}
        """Completions that have not started, by the request that computes their prompt."""

    def __len__(self) -> int:
        return sum(map(len, self.further.values()))

    def __contains__(self, request: Request) -> bool:
        return any(request in group for group in self.further.values())

    def hold_back(self, requests: Iterable[Request]) -> list[Request]:
        """Keep the completions that start from the KV of another one of these requests: its prompt
        is the same, and neither has an output token yet.

        Returns:
            The completions that are kept. The caller must not queue them.
        """
        without_tokens = [each for each in requests if not each.num_output_tokens]
        firsts = {each.arrival: each for each in without_tokens if each.index == 0}
        group = [each for each in without_tokens if each.index and each.arrival in firsts]
        for completion in group:
            self.further.setdefault(firsts[completion.arrival], []).append(completion)
        return group

    def num_of(self, requests: Iterable[Request]) -> int:
        """Return how many completions are still to start from the KV of these requests."""
        return sum(len(self.further.get(request, ())) for request in requests)

    def start(self, request: Request) -> list[Request]:
        """Pop the completions that start from this request's KV; the caller lets them run."""
        return self.further.pop(request, [])

    def discard(self, request: Request) -> bool:
        """Drop a completion that has not started. Returns False if there is none such."""
        for first, group in self.further.items():
            if request in group:
                group.remove(request)
                if not group:
                    del self.further[first]
                return True
        return False

    def take_all(self) -> list[Request]:
        """Pop all completions that have not started."""
        everyone = [each for group in self.further.values() for each in group]
        self.further = {}
        return everyone
