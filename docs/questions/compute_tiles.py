"""Attention of N tokens with an N x N matrix of scores, and in tiles: memory and time of both.

Memory is measured: bytes of all tensors that are alive at the same time, at most. So is the CPU
time, on one thread, with torch's own kernel (tiles, in C++) beside them.
"""

import time
import weakref

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

HEADS, HEAD_DIM, TILE = 4, 64, 128


class PeakMemory(TorchDispatchMode):
    """Counts the memory of tensors that are made inside, and subtracts it when it is freed."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.sizes: dict[int, int] = {}  # bytes of live tensors, by address
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the tensors of an operator. torch calls it for every one."""
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if storage is not None and storage.data_ptr() not in self.inputs | set(self.sizes):
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self.peak = max(self.peak, sum(self.sizes.values()))
            weakref.finalize(storage, self.sizes.pop, storage.data_ptr())
        return result


def whole(query, key, value):
    """Compute scores of all pairs in one matrix `[heads, N, N]`."""
    scores = query @ key.transpose(1, 2)
    is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill_(is_later, -torch.inf).softmax(-1) @ value


def tiled(query, key, value):
    """Compute one tile of queries with one tile of keys after the other, by online softmax."""
    output = torch.empty_like(query)
    for first in range(0, query.shape[1], TILE):
        rows = query[:, first : first + TILE]
        row_max = torch.full((HEADS, rows.shape[1], 1), -torch.inf)
        row_sum, total = torch.zeros_like(row_max), torch.zeros_like(rows)
        for start in range(0, first + TILE, TILE):  # tiles above the diagonal are never computed
            scores = rows @ key[:, start : start + TILE].transpose(1, 2)
            if start == first:
                is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(is_later, -torch.inf)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            rescale, weights = (row_max - new_max).exp(), (scores - new_max).exp()
            row_sum = row_sum * rescale + weights.sum(-1, keepdim=True)
            total = total * rescale + weights @ value[:, start : start + TILE]
            row_max = new_max
        output[:, first : first + TILE] = total / row_sum
    return output


def fused(query, key, value):
    """Let torch's kernel compute it: tiles, and no tensor between two operations."""
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], None, 0, True, scale=1
    )[0]


def milliseconds(attention, *inputs: torch.Tensor) -> float:
    """Return the CPU time of a call: the least of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        attention(*inputs)
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    """Compute both ways, for longer and longer prompts."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{HEADS} heads of {HEAD_DIM}, float32, tiles of {TILE} tokens")
    print("        memory at worst of                        time of")
    print(
        "tokens      N x N      tiles   query, key, value      N x N      tiles      torch's   same"
    )
    for num_tokens in (256, 512, 1024, 2048):
        query, key, value = torch.randn(3, HEADS, num_tokens, HEAD_DIM).unbind()
        query /= HEAD_DIM**0.5
        results, peaks = [], []
        for attention in (whole, tiled):
            with PeakMemory(query, key, value) as memory:
                results.append(attention(query, key, value))
            peaks.append(memory.peak / 1e6)
        results.append(fused(query, key, value))
        is_same = all(torch.allclose(results[0], each, atol=1e-5) for each in results)
        inputs = 3 * query.nbytes / 1e6
        times = [milliseconds(each, query, key, value) for each in (whole, tiled, fused)]
        row = f"{num_tokens:6,}{peaks[0]:8.1f} MB{peaks[1]:8.1f} MB{inputs:17.1f} MB"
        print(row + "".join(f"{each:8.1f} ms" for each in times) + f"   {is_same}")


if __name__ == "__main__":
    main()
