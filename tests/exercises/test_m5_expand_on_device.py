"""Checks exercises/m5_expand_on_device.py."""

import pytest
import torch

from m5_kernels.kernels.expand_step import expand_step_torch
from m5_kernels.kernels.step_metadata import RowState, StepMetadata

EXERCISE = ("m5_expand_on_device.py", "expand")
NAMES = ("positions", "slot_mapping", "query_start_loc", "context_lens")

BLOCK_SIZE = 4
TABLES = torch.tensor([[3, 7, 1], [5, 0, 2], [6, 4, 8]])
STEPS = {
    "decode and prompt": ([4, 0, 7], [1, 3, 0], 6),
    "no padding": ([4, 0, 7], [1, 3, 2], 6),
    "padding first": ([7, 4, 0], [0, 1, 3], 6),
    "padding between": ([2, 9, 5], [4, 0, 5], 12),
    "decode only": ([4, 9, 7], [1, 1, 1], 4),
    "nobody": ([4, 9, 7], [0, 0, 0], 4),
}


def wanted(num_computed, num_new, num_tokens):
    """What the specification of the engine's kernel gives."""
    state = RowState(
        torch.zeros(3, 12, dtype=torch.int32),
        TABLES.int(),
        torch.tensor(num_computed, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        BLOCK_SIZE,
    )
    output = StepMetadata.allocate(num_tokens, 3, 3, "cpu")
    expand_step_torch(state, torch.arange(3), torch.tensor(num_new), output)
    return [getattr(output, name).tolist() for name in NAMES]


def one_after_another(num_computed, num_new, block_tables, block_size, num_tokens):
    """The way of M3: read the numbers, then loop."""
    positions, slots, starts = [], [], [0]
    for seq, (computed, new) in enumerate(
        zip(num_computed.tolist(), num_new.tolist(), strict=True)
    ):
        for position in range(computed, computed + new):
            block = int(block_tables[seq, position // block_size])
            positions.append(position)
            slots.append(block * block_size + position % block_size)
        starts.append(len(positions))
    num_padding = num_tokens - len(positions)
    positions, slots = positions + [0] * num_padding, slots + [-1] * num_padding
    lists = torch.tensor(positions), torch.tensor(slots), torch.tensor(starts)
    return *lists, num_computed + num_new


WRONG, TOLD = one_after_another, "waits for values from the GPU: tolist, tolist, __int"


WAITING = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"),
    *("__bool__", "__int__", "__index__", "__float__"),
}


class NotesReads(torch.overrides.TorchFunctionMode):
    """Notes what makes the host wait for the values of a tensor."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", "")
        self.reads += [name] if name in WAITING else []
        return function(*arguments, **(keywords or {}))


def reads_of(expand):
    num_computed, num_new, num_tokens = STEPS["decode and prompt"]
    with NotesReads() as noted:
        expand(torch.tensor(num_computed), torch.tensor(num_new), TABLES, BLOCK_SIZE, num_tokens)
    return noted.reads


@pytest.mark.parametrize("step", STEPS)
def test_a_step(exercise, step):
    num_computed, num_new, num_tokens = STEPS[step]
    result = exercise(
        torch.tensor(num_computed), torch.tensor(num_new), TABLES, BLOCK_SIZE, num_tokens
    )
    right = wanted(num_computed, num_new, num_tokens)
    for name, own, values in zip(NAMES, result, right, strict=True):
        assert own.tolist() == values, (
            f"num_computed {num_computed}, num_new {num_new}, num_tokens {num_tokens}: {name} "
            f"should be {values}, yours is {own.tolist()}"
        )


def test_nobody_looks_at_a_value(exercise, figure):
    reads, before = reads_of(exercise), reads_of(one_after_another)
    figure("times that the host waits for the GPU", str(len(reads)), str(len(before)))
    assert not reads, f"your code waits for values from the GPU: {', '.join(reads)}"
    meta = [torch.empty(3, dtype=torch.int64, device="meta") for _ in range(2)]
    tables = torch.empty(3, 3, dtype=torch.int64, device="meta")
    try:
        result = exercise(*meta, tables, BLOCK_SIZE, 6)
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(
            "your code does not run on tensors without values. Either it reads a value, or a shape "
            f"depends on one, or a new tensor is on another device. torch says: {error}"
        ) from None
    shapes = [tuple(tensor.shape) for tensor in result]
    assert shapes == [(6,), (6,), (4,), (3,)], f"shapes {shapes}, not [(6,), (6,), (4,), (3,)]"
    assert all(tensor.device.type == "meta" for tensor in result), (
        "a result is on another device than what came in"
    )
