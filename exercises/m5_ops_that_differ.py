"""M5, tensors: find the operations whose result depends on the batch, from two traces.

A request was computed alone, and again as one row of a batch. Each time every operation left a
record: its name, the tensors that it read, and the tensor that it returned. A row of a tensor
belongs to a row of the batch; alone there is one:

    alone       norm [1, 64] -> [1, 64]     linear [1, 64] -> [1, 96]     activation ...
    together    norm [5, 64] -> [5, 64]     linear [5, 64] -> [5, 96]     activation ...
                     row 3 is the same           row 3 is the same in, and another out: this one

Once a bit has changed, every later operation gets other numbers and returns other numbers. It is
innocent. An operation is guilty if the row that it read is the same, bit for bit, and the row that
it returned is not. More than one may be.

"The same" is not `==`: 0.0 equals -0.0, and NaN equals nothing, itself included. And "close" is not
the same at all: the difference that counts here is the last bit.

    python -m pytest tests/exercises/test_m5_ops_that_differ.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Record(NamedTuple):
    """What an operation read and returned, in float32 or bfloat16; the first dimension is rows."""

    name: str
    inputs: list[torch.Tensor]
    output: torch.Tensor


def ops_that_differ(alone: list[Record], together: list[Record], row: int) -> list[str]:
    """Return the names of the guilty operations, in order.

    Args:
        alone: the records of the request alone, whose tensors have one row.
        together: the records of the batch: the same operations in the same order.
        row: the request's row in the batch.

    Hint: `tensor.view(torch.int32)` are the bits of float32, `torch.int16` those of bfloat16.
    `torch.equal` of two tensors of integers is exact.
    """
    raise NotImplementedError
