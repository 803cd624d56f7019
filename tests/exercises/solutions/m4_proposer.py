from __future__ import annotations

from weakref import WeakKeyDictionary

from m4_prefix_chunked.ngram import NGRAM_LENGTHS, NgramProposer
from milestone_llm.core.request import Request


class SharedProposer(NgramProposer):
    """One index for each salt: where the token behind an n-gram stands, and in whose tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[str, dict[tuple[int, ...], tuple[list[int], int]]] = {}
        self._num_noted = WeakKeyDictionary[Request, int]()

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        if request.num_in_flight:
            return []
        known = request.token_ids
        shared = self._shared.setdefault(request.sampling_params.cache_salt, {})
        for position in range(self._num_noted.get(request, 1), len(known)):
            for length in NGRAM_LENGTHS:
                if length <= position:
                    shared[tuple(known[position - length : position])] = (known, position)
        self._num_noted[request] = max(1, len(known))
        if guesses := super().propose(request, num_tokens):
            return guesses
        for length in NGRAM_LENGTHS:
            tokens, first = shared.get(tuple(known[-length:]), (known, len(known)))
            if guesses := tokens[first : first + num_tokens]:
                return guesses
        return []
