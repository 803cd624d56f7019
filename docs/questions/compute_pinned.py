"""Copies from the host: pageable or pinned memory, waited for or beside a kernel. Needs a GPU."""

import sys
import time

import torch

if not torch.cuda.is_available():
    sys.exit("This measures copies to a GPU and needs an NVIDIA GPU; torch.cuda finds none here.")

NUM_BYTES, ROUNDS = 256 * 2**20, 10
pageable = torch.empty(NUM_BYTES, dtype=torch.uint8)
pinned = pageable.pin_memory()
target = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
side = torch.cuda.Stream()


def copy(source: torch.Tensor) -> None:
    """Queue a copy; from pageable memory the call itself waits."""
    target.copy_(source, non_blocking=True)


def copy_beside() -> None:
    """Queue a copy on a stream of its own, so that it may run beside the kernel."""
    with torch.cuda.stream(side):
        copy(pinned)


def milliseconds(*calls) -> tuple[float, float]:
    """Until the calls return, and until the GPU is done; means of some rounds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    returned = done = 0.0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for call in calls:
            call()
        returned += time.perf_counter() - start
        torch.cuda.synchronize()
        done += time.perf_counter() - start
    return 1e3 * returned / ROUNDS, 1e3 * done / ROUNDS


def multiply() -> None:
    """Some milliseconds of work for the GPU."""
    for _ in range(8):
        matrix @ matrix


print(f"{torch.cuda.get_device_name()}; copies of {NUM_BYTES // 2**20} MiB to it")
print("                                      calls return    GPU is done")
for name, *calls in (
    ("copy from pageable memory", lambda: copy(pageable)),
    ("copy from pinned memory", lambda: copy(pinned)),
    ("matrix products", multiply),
    ("products, then copy, one stream", multiply, lambda: copy(pinned)),
    ("products beside copy, two streams", multiply, copy_beside),
):
    returned, done = milliseconds(*calls)
    print(f"{name:36}{returned:11.2f} ms{done:12.2f} ms")
