"""Checks exercises/m5_ops_that_differ.py."""

from typing import NamedTuple

import pytest
import torch

EXERCISE = ("m5_ops_that_differ.py", "ops_that_differ")
ROW = 3


class Record(NamedTuple):
    """As in the exercise."""

    name: str
    inputs: list[torch.Tensor]
    output: torch.Tensor


def linear(hidden, weight, num_parts):
    """Add the products of each row from first to last, in so many parts, which are added last."""
    parts = []
    for part in (hidden[:, None, :] * weight).chunk(num_parts, dim=2):
        total = torch.zeros(part.shape[:2])
        for products in part.unbind(2):
            total = total + products
        parts.append(total)
    return sum(parts[1:], parts[0])


def mlp(hidden, split):
    """Return the records of an MLP. split: names of linear layers whose sums have two parts, if
    there are several rows."""
    generator, records = torch.Generator().manual_seed(0), []

    def note(name, inputs, output):
        records.append(Record(name, inputs, output))
        return output

    def layer(name, read):
        weight = torch.randn(48, 48, generator=generator)
        return note(name, [read], linear(read, weight, 1 + (name in split and len(read) > 1)))

    gate, up = layer("gate", hidden), layer("up", hidden)
    activated = note("relu", [gate], gate.clamp(min=0))
    down = layer("down", note("mul", [activated, up], activated * up))
    note("add", [down, hidden], down + hidden)
    return records


def traces(split):
    """Return the records of a row alone, and of the batch."""
    rows = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    return mlp(rows[ROW : ROW + 1], split), mlp(rows, split)


def where_outputs_differ(alone, together, row):
    """What one tries first: every operation whose result is another."""
    return [
        one.name
        for one, many in zip(alone, together, strict=True)
        if not torch.equal(one.output[0], many.output[row])
    ]


WRONG, TOLD = where_outputs_differ, "it passes on what it got"


@pytest.mark.parametrize("split", [(), ("gate",), ("up",), ("down",)], ids=str)
def test_the_guilty_operation_is_found(exercise, split):
    found = exercise(*traces(split), ROW)
    for name in found:
        assert name in split, f"{name} is innocent: it passes on what it got"
    assert found == list(split), f"{split} read the same, and returned something else"


def test_there_may_be_two(exercise, figure):
    """Beside each other: after the first, an operation gets other numbers."""
    alone, together = traces(("gate", "up"))
    found, before = exercise(alone, together, ROW), where_outputs_differ(alone, together, ROW)
    figure("operations under suspicion", str(len(found)), str(len(before)))
    assert found == ["gate", "up"], "gate and up read the same, and both differ"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_compared(exercise, dtype):
    read, zeros = torch.ones(5, 4, dtype=dtype), torch.zeros(5, 4, dtype=dtype)
    nans = torch.full((5, 4), torch.nan, dtype=dtype)
    alone = [Record("relu", [read[:1]], zeros[:1]), Record("log", [read[:1]], nans[:1])]
    together = [Record("relu", [read], -zeros), Record("log", [read], nans)]
    alone.append(Record("reciprocal", [zeros[:1]], 1 / zeros[:1]))
    together.append(Record("reciprocal", [-zeros], 1 / -zeros))
    found = exercise(alone, together, ROW)
    assert "reciprocal" not in found, "reciprocal is innocent: it read 0.0 alone, and -0.0 together"
    assert "log" not in found, "a NaN has the same bits as this NaN"
    assert found == ["relu"], "0.0 and -0.0 are equal, and not the same"
