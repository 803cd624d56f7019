"""The tokens that rows may sample, as a bitmask on the device (structured output)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from milestone_llm.core.sampling import unpack_bits


class TokenBitmask:
    """A bitmask for each row of device state. Without a grammar, a row may sample every token."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        num_words = (vocab_size + 31) // 32
        self.words = torch.full((num_rows, num_words), -1, dtype=torch.int32, device=device)
        self._every = torch.full((num_words,), -1, dtype=torch.int32)
        self._masked: set[int] = set()
        """Rows whose bitmasks do not allow every token."""

    def send(self, bits: Mapping[int, torch.Tensor]) -> None:
        """Set the bitmasks of a step in one transfer, without waiting.

        bits: the bitmask of each row with a grammar, by row, int32 `[num_words]`.
        """
        rows = [*bits, *(self._masked - bits.keys())]
        on_gpu = self.words.is_cuda
        masks = torch.empty(len(rows), len(self._every), dtype=torch.int32, pin_memory=on_gpu)
        for place, row in enumerate(rows):
            masks[place] = bits.get(row, self._every)
        index = torch.tensor(rows, pin_memory=on_gpu).to(self.words.device, non_blocking=True)
        self.words[index] = masks.to(self.words.device, non_blocking=True)
        self._masked = set(bits)

    def apply(self, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return scores `[num_seqs, vocab_size]` with -inf where a row may not sample a token."""
        return scores.masked_fill(~unpack_bits(self.words[rows], scores.shape[-1]), -math.inf)
