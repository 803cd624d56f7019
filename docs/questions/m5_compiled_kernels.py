"""Each elementwise kernel of M5 beside its twin, compiled by `torch.compile`. Needs a GPU."""

import sys
from functools import partial

import torch

from docs.questions.m5_compiled import TWINS
from m5_kernels.tools.kernel_bench import elementwise_cases
from m5_kernels.tools.measure import Ceilings, check, median_us
from milestone_llm.command.cli import console
from milestone_llm.lab.bench.report import table

if not torch.cuda.is_available():
    sys.exit("This measures kernels and needs an NVIDIA GPU; torch.cuda finds none here.")

ceilings = Ceilings.measure()
rows = []
for case in elementwise_cases():
    row = case.row(ceilings)
    by_compiler = torch.compile(TWINS[case.kernel.__name__], dynamic=False)
    check(f"{case.name}, compiled", case.results(by_compiler)[0], case.results(case.kernel)[0])
    runs = [partial(by_compiler, *arguments) for arguments in case.inputs]
    rows.append([*row, f"{median_us(runs):.1f}"])
headings = ["others", "us", "GB/s", "of copying", "torch.compile, us"]
console.print(table("", headings, rows))
