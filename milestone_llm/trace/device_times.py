"""Times of host and device for a step, in microseconds, where a profiler has run."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12


class Span(TypedDict):
    """A part of the host's work, or a kernel or copy. `start_us` counts from the step's start."""

    name: str
    start_us: NonNegativeFloat
    us: NonNegativeFloat


class DeviceTimes(TypedDict):
    """Times of one step. The device's are from its first kernel to the end of its last one."""

    host: list[Span]
    is_graph: bool
    num_launches: NonNegativeInt
    """Calls of the host: kernels, copies, graphs."""
    num_kernels: NonNegativeInt
    start_us: NonNegativeFloat
    us: NonNegativeFloat
    busy_us: NonNegativeFloat
    kernels: list[Span]
    """Empty if they are the same as those of an earlier step."""
