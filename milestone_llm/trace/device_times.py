"""What host and device did for a step, in microseconds, where a profiler has looked."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12


class Span(TypedDict):
    """A part of the host's work, or a kernel or copy. It begins so long after its step did."""

    name: str
    start_us: NonNegativeFloat
    us: NonNegativeFloat


class DeviceTimes(TypedDict):
    """One step's. Of the device: from its first kernel to the end of its last."""

    host: list[Span]
    is_graph: bool
    num_launches: NonNegativeInt
    """Calls of the host: kernels, copies, graphs."""
    num_kernels: NonNegativeInt
    start_us: NonNegativeFloat
    us: NonNegativeFloat
    busy_us: NonNegativeFloat
    kernels: list[Span]
    """None where they are like those of a step before."""
