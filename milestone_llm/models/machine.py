"""Cores and memory of the machine. What needs more memory is rejected before any is allocated."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from milestone_llm.core.errors import InputError


def usable_cores() -> int:
    """Return the number of CPU cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> int:
    """Return bytes of main memory: the machine's, or its container's limit if that is lower."""
    limits = [sys.maxsize]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not every system has them
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):
        limits += _container_limits(Path("/proc/self/cgroup").read_text())
    return min(limits)


def _container_limits(groups: str, root: str = "/sys/fs/cgroup") -> Iterator[int]:
    """Yield limits of the control groups that this process is in, of both versions (cgroups(7))."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            hierarchy, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            hierarchy, name = f"{root}/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(hierarchy + path)
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max", or not visible from inside
                yield int((folder / name).read_text())


def check_memory(num_bytes: int, device: torch.device, what: str, advice: str) -> None:
    """Check that memory suffices, before it is allocated.

    Args:
        what: name of what needs it, for the error; `advice` says what to do.

    Raises:
        InputError: more than a CPU machine's memory, or more than a GPU has free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit, place = free + unused, f"{device} has {{}} left"
    else:
        limit, place = host_memory(), "this machine has {}"
    if num_bytes > limit:
        raise InputError(
            f"{what} takes {_gib(num_bytes)}, and {place.format(_gib(limit))}: {advice}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
