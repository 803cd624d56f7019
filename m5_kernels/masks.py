"""Which tokens rows may sample, as bits on the device: for requests with a rule of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from milestone_llm.core.sampling import unpack_bits


class Masks:
    """A mask for each row of device state. Those of requests without a rule allow every token."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        num_words = (vocab_size + 31) // 32
        self.words = torch.full((num_rows, num_words), -1, dtype=torch.int32, device=device)
        self._every = torch.full((num_words,), -1, dtype=torch.int32)
        self._ruled: set[int] = set()
        """Rows whose masks do not allow every token."""

    def send(self, bits: Mapping[int, torch.Tensor]) -> None:
        """Set the masks of a step: by row, those of its requests with a rule, int32 `[num_words]`.
        One transfer, for which nobody waits."""
        rows = [*bits, *(self._ruled - bits.keys())]
        on_gpu = self.words.is_cuda
        masks = torch.empty(len(rows), len(self._every), dtype=torch.int32, pin_memory=on_gpu)
        for place, row in enumerate(rows):
            masks[place] = bits.get(row, self._every)
        index = torch.tensor(rows, pin_memory=on_gpu).to(self.words.device, non_blocking=True)
        self.words[index] = masks.to(self.words.device, non_blocking=True)
        self._ruled = set(bits)

    def apply(self, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Scores `[num_seqs, vocab_size]` of these rows of state, -inf where a token may not be."""
        return scores.masked_fill(~unpack_bits(self.words[rows], scores.shape[-1]), -math.inf)
