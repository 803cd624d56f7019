"""Kernels of the lesson compile for GPUs that are not there, and wait before they write."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from docs.benchmarks.other_gpus import compile_lesson
from m5_kernels.kernels.triton_or_twin import INTERPRETED
from m5_kernels.sampler import SamplingFeatures
from m5_kernels.step_graphs import StepShape

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU, with a driver of its own"
    ),
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled"),
]
WAIT = "griddepcontrol.wait"
WRITE = re.compile(r"\b(st\.global|atom\.|red\.)")
SHAPES = [(StepShape(2, 2, 2, 0), SamplingFeatures(filters=True))]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_a_step_compiles(target):
    kernels = compile_lesson(target, shapes=SHAPES)
    assert len(kernels) > 8
    assert [each.problem for each in kernels if each.problem] == []
    if target != "sm_90":
        return
    waiting = [each for each in kernels if WAIT in each.code]
    assert {"flash_decode", "rope_kv_write", "rms_norm"} <= {each.name for each in waiting}
    for each in waiting:
        early = [line for line in before_the_wait(each.code) if WRITE.search(line)]
        assert early == [], each.name


def before_the_wait(code: str) -> list[str]:
    """The instructions that can be reached without waiting for the kernel before."""
    body = code[code.index(".entry") :].splitlines()
    lines = [line.partition("//")[0].strip() for line in body]
    labels = {line[:-1]: place for place, line in enumerate(lines) if line.endswith(":")}
    early, stack, seen = [], [0], set()
    while stack:
        place = stack.pop()
        if place in seen or place >= len(lines) or WAIT in lines[place]:
            continue
        seen.add(place)
        line = lines[place]
        early.append(line)
        if jump := re.search(r"\bbra(?:\.uni)?\s+(\S+);", line):
            stack.append(labels[jump[1]])
        if line.startswith("@") or not re.search(r"\b(bra|ret|exit)\b", line):
            stack.append(place + 1)
    return early
