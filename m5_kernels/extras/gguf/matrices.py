"""A decoder's matrices, in the words of a file."""

from __future__ import annotations

from typing import Any

import torch

from m5_kernels.decoder.products import Matrix
from m5_kernels.decoder.weights import Matrices

from .file import GGUFFile
from .packed import PackedMatrix


class GGUFMatrices(Matrices):
    """Takes words as they are. The embedding, which is looked up, becomes numbers."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._made: list[PackedMatrix] = []

    def empty(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Matrix:
        """Room for one: there is none before it is filled."""
        self._made.append(PackedMatrix(out_size, in_size))
        return self._made[-1]

    def fill(
        self, target: Matrix, weight: Any, part: tuple[slice, ...], dtype: torch.dtype
    ) -> None:
        """Take a weight of the file."""
        target.stored = weight.words

    def lm_head(self, embedding: torch.Tensor, is_tied: bool) -> Matrix:
        """Room for the LM head."""
        out_size, in_size = embedding.shape
        return self.empty(out_size, in_size, embedding.dtype, embedding.device)

    def tie(self, lm_head: Matrix, embedding: torch.Tensor) -> None:
        """The words of the embedding are those of the LM head."""
        lm_head.stored = self.file.weights["model.embed_tokens.weight"].words

    def pack(self) -> None:
        """All are filled: bring them into the order of products, before a request waits for it."""
        for matrix in self._made:
            _ = matrix.packed
