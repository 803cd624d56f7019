"""One MLP sharded over two processes: columns, then rows, then one all-reduce. Runs on a CPU."""

import multiprocessing
import socket

import torch
import torch.distributed as dist
import torch.nn.functional as F

HIDDEN, NEURONS, RANKS = 64, 256, 2


def mlp(x, gate, up, down):
    """Compute a layer's MLP; weights are `[output, input]`, as in `nn.Linear`."""
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def distance(part, whole):
    """Return the largest difference, in words that do not depend on rounding."""
    largest = (part - whole).abs().max().item()
    return "no difference" if largest < 1e-10 else f"up to {largest:.1f} away"


def work(rank: int, port: int) -> None:
    """Run one process."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # all ranks make the same weights, to compute the expected result
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    gate, up = torch.randn(2, NEURONS, HIDDEN, dtype=torch.float64) / 8
    down = torch.randn(HIDDEN, NEURONS, dtype=torch.float64) / 8
    bias = torch.randn(HIDDEN, dtype=torch.float64)
    whole = mlp(x, gate, up, down)

    mine = slice(rank * NEURONS // RANKS, (rank + 1) * NEURONS // RANKS)
    gate, up, down = gate[mine], up[mine], down[:, mine]  # a real rank loads only these
    part = mlp(x, gate, up, down)  # no communication so far
    if rank == 0:
        print(f"each rank: gate, up {list(gate.shape)}, down {list(down.shape)}")
        print(f"a part of the sum:         {distance(part, whole)}")
    wrong = part + bias  # every rank adds it
    dist.all_reduce(part)
    dist.all_reduce(wrong)
    if rank == 0:
        print(f"after the all-reduce:      {distance(part, whole)}")
        print(f"bias added by every rank:  {distance(wrong, whole + bias)}")
        print(f"bias added by one rank:    {distance(part + bias, whole + bias)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=work, args=(rank, port)) for rank in range(1, RANKS)]
    for process in others:
        process.start()
    work(0, port)
    for process in others:
        process.join()
