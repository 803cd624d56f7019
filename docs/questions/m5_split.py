"""Why split KV: Flash-Decoding with ever more programs for the same sequences. Needs a GPU.

With one program a KV head and sequence, as many multiprocessors work as there are such pairs: for
one long context eight of 132. The first line of each shape has that many programs.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from m5_kernels.kernels.flash_decode import flash_decode
from m5_kernels.tools.attention_work import NUM_KV_HEADS, Shape, expected, workspace_of
from m5_kernels.tools.kernel_bench import HEAD_DIM, rated
from m5_kernels.tools.measure import Ceilings, check, median_us
from milestone_llm.command.cli import console
from milestone_llm.lab.bench.report import table
from milestone_llm.trace.text import plural


def rows(ceilings: Ceilings) -> Iterator[list[str]]:
    """A line for each shape and number of programs; every launch is compared with the twin."""
    for shape in (Shape(1, 131_072), Shape(1, 16_384), Shape(16, 2_048), Shape(256, 1_024)):
        batches = shape.batches(HEAD_DIM)
        reference = expected(shape, batches[0])
        full = workspace_of(batches[0])
        most = full.programs_per_head
        least = min(shape.num_seqs, most)
        for count in sorted({least, most, *(n for n in (4, 16) if least < n < most)}):
            workspace = replace(full, programs_per_head=count)
            runs = [partial(flash_decode, *b.decode_inputs, workspace=workspace) for b in batches]
            check(f"{shape.name}, {count} programs", runs[0](), reference)
            us = median_us(runs)
            name = f"{plural(shape.num_seqs, 'sequence')} of {shape.context_len:,}"
            _, *numbers = rated("", us, shape.speed(HEAD_DIM, us), ceilings.read_gbps)
            yield [name, f"{count * NUM_KV_HEADS}", *numbers]


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("This measures a kernel and needs an NVIDIA GPU; torch.cuda finds none here.")
    found = Ceilings.measure()
    console.print(str(found), soft_wrap=True)
    headings = ["flash_decode, KV split", "programs", "us", "GB/s", "of reading"]
    console.print()
    console.print(table("", headings, rows(found)))
