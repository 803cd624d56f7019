"""One-shot all-reduce, fused with the norm that follows it: add to the residual, RMSNorm.

    rank 0   part --> memory of rank 0, of rank 1    every rank writes its part of a row into
    rank 1   part --> memory of rank 0, of rank 1    a buffer that each rank keeps for it,
             flag --> (after the part)               then raises a flag there,
             wait for the flags in its own memory    waits until all flags are up,
             sum of the parts, + residual, norm      and reads what is now in its own memory

A ring all-reduce moves the least data, but in 2 (n - 1) rounds. A decode step's row is some
kilobytes, so the rounds are what takes time. Here there is one round, and every rank adds all parts
itself, in the same order. The memory is symmetric: each GPU can write to the others' over NVLink.

Two all-reduces in a row never use the same buffer. Each rank begins the next all-reduce when it is
done with this one, so one exchange of flags is enough to use a buffer again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.rms_norm import norm_of_row
from m5_kernels.kernels.triton_or_twin import next_power_of_2, tl, triton

NUM_BUFFERS = 3
"""For the sums after attention, after the MLP, and of the embedding: never one twice in a row."""


class SymmetricBuffer:
    """Memory into which all ranks can write.

    Args:
        max_rows: most rows of an all-reduce.

    Raises:
        RuntimeError: these GPUs cannot write to each other's memory.
    """

    def __init__(
        self, max_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None
        self.rank, self.size, self.max_rows = group.rank(), group.size(), max_rows
        shape = (NUM_BUFFERS, self.size, max_rows)
        self.data = symmetric_memory.empty(*shape, hidden_size, dtype=dtype, device=device)
        self.flags = symmetric_memory.empty(*shape, dtype=torch.int32, device=device)
        self.flags.zero_()
        self.pointers = torch.tensor(
            [
                symmetric_memory.rendezvous(each, group).buffer_ptrs
                for each in (self.data, self.flags)
            ],
            device=device,
        )
        """int64 `[2, size]`: the addresses of each rank's buffers and flags."""
        dist.all_reduce(torch.zeros(1, device=device))  # no rank writes before all flags are zero
        torch.cuda.synchronize(device)


def all_reduce_add_rms_norm(
    part: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    buffers: SymmetricBuffer,
    buffer: int,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Set `residual +=` the sum of all ranks' `part`, and return the norm; the same on all ranks.

    part, residual: `[num_tokens, hidden_size]`, at most `buffers.max_rows` rows, contiguous.
    buffer: 0 to 2; not that of the all-reduce before.
    Returns `[num_tokens, hidden_size]`, contiguous. The specification is an all-reduce, then
    `add_rms_norm_torch`. Sums are rounded once here and twice there.
    """
    num_tokens, hidden_size = part.shape
    output = torch.empty_like(part)
    row = next_power_of_2(hidden_size)
    launch.kernel(_all_reduce_norm_kernel, (num_tokens,))(
        part, residual, weight, output, buffers.pointers,
        residual.stride(0), epsilon, buffers.rank, buffer,
        SIZE=buffers.size,
        MAX_ROWS=buffers.max_rows,
        HIDDEN_SIZE=hidden_size,
        ROW=row,
        num_warps=min(16, max(1, row // 512)),
        **launch.pdl_options(),
    )  # fmt: skip
    return output


@triton.jit
def _all_reduce_norm_kernel(
    part, residual, weight, output, pointers,
    residual_stride, epsilon, rank, buffer,
    SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    columns = tl.arange(0, ROW)
    mask = columns < HIDDEN_SIZE
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    row = tl.load(part + token.to(tl.int64) * HIDDEN_SIZE + columns, mask=mask, other=0.0)
    own_place = (buffer * SIZE + rank) * MAX_ROWS + token
    for other in tl.static_range(SIZE):
        buffers = _pointer(pointers, other, part.dtype.element_ty)
        tl.store(buffers + own_place.to(tl.int64) * HIDDEN_SIZE + columns, row, mask=mask)
    tl.debug_barrier()  # all threads have written their part of the row before a flag is raised
    for other in tl.static_range(SIZE):
        flags = _pointer(pointers, SIZE + other, tl.int32)
        tl.atomic_xchg(flags + own_place, 1, sem="release", scope="sys")
    buffers = _pointer(pointers, rank, part.dtype.element_ty)
    flags = _pointer(pointers, SIZE + rank, tl.int32)
    total = tl.zeros([ROW], dtype=tl.float32)
    for other in tl.static_range(SIZE):
        place = (buffer * SIZE + other) * MAX_ROWS + token
        while tl.atomic_cas(flags + place, 1, 0, sem="acquire", scope="sys") != 1:
            pass
        tl.debug_barrier()
        theirs = buffers + place.to(tl.int64) * HIDDEN_SIZE + columns
        total += tl.load(theirs, mask=mask, other=0.0, volatile=True).to(tl.float32)
    sums = residual + token.to(tl.int64) * residual_stride + columns
    total += tl.load(sums, mask=mask, other=0.0).to(tl.float32)
    total_row = total.to(row.dtype)
    tl.store(sums, total_row, mask=mask)
    place = output + token.to(tl.int64) * HIDDEN_SIZE + columns
    tl.store(place, norm_of_row(total_row, weights, epsilon, HIDDEN_SIZE), mask=mask)


@triton.jit
def _pointer(pointers, index, dtype: tl.constexpr):
    """Return a pointer from a list of addresses, which are multiples of 16 bytes."""
    return tl.multiple_of(tl.load(pointers + index).to(tl.pointer_type(dtype)), 16)
