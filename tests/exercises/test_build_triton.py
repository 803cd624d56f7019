"""The course of Triton: its solutions pass, mistakes are told, and what is not begun gets a hint.

Kernels run on a GPU or under Triton's interpreter, which must be chosen before anything imports
triton. So this file runs in a process with TRITON_INTERPRET=1.
"""

import importlib
import re
import shutil
from pathlib import Path

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON, INTERPRETED

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (INTERPRETED or torch.cuda.is_available())),
    reason="runs in a process of its own, under Triton's interpreter",
)

SOLUTIONS = Path(__file__).parent / "solutions" / "build_triton"
NUM_STEPS = 6

MISTAKES = {  # step, file, what stands there, the mistake, words of what is told
    "a row without a mask": (
        1,
        "row_sum.py",
        ", mask=columns < num_columns, other=0.0)",
        ")",
        "3 rows of 5 columns\n.*\nThe kernel has read what lies behind",
    ),
    "a mask and no word on what it leaves out": (
        1,
        "row_sum.py",
        ", other=0.0)",
        ")",
        "3 rows of 5 columns\n.*nan.*\n.*What the mask leaves out is undefined",
    ),
    "rows taken for neighbours": (
        1,
        "row_sum.py",
        "row * row_stride",
        "row * num_columns",
        "Rows may lie apart",
    ),
    "the same row by every program": (
        1,
        "row_sum.py",
        "x + row * row_stride",
        "x",
        "3 rows of 8 columns\n.*\nRow 0 is right",
    ),
    "nothing stored": (
        1,
        "row_sum.py",
        "    tl.store(output + row, tl.sum(tile, 0))\n",
        "",
        "Nothing was written",
    ),
    "a misspelt operation": (
        1,
        "row_sum.py",
        "tl.sum(",
        "tl.add_up(",
        "AttributeError: .*add_up",
    ),
    "masked elements that are zeros": (
        2,
        "row_softmax.py",
        'other=-float("inf")',
        "other=0.0",
        "softmax of a row with zeros behind it",
    ),
    "no maximum": (2, "row_softmax.py", "tile - tl.max(tile, 0)", "tile", "0 / 0 is NaN: subtract"),
    "no sum": (2, "row_softmax.py", " / tl.sum(weights, 0)", "", "Divide them by their sum"),
    "a store without a mask": (
        2,
        "row_softmax.py",
        "tl.sum(weights, 0), mask=mask)",
        "tl.sum(weights, 0))",
        "written outside of output",
    ),
    "output's rows where those of x are": (
        2,
        "row_softmax.py",
        "row * output_stride",
        "row * x_stride",
        "written outside of output",
    ),
    "rows of x where those of output are": (
        3,
        "online_softmax.py",
        "row * x_stride",
        "row * output_stride",
        "Row i begins at",
    ),
    "no rescaling": (
        3,
        "online_softmax.py",
        "row_sum * rescale",
        "row_sum",
        "The falling row was right",
    ),
    "only the last tile's sum": (
        3,
        "online_softmax.py",
        "row_sum * rescale + ",
        "",
        "Is row_sum kept from tile to tile",
    ),
    "a tail of zeros": (
        3,
        "online_softmax.py",
        'other=-float("inf")',
        "other=0.0",
        "3 rows of 10 columns, tiles of 4\n.*\nThat is the softmax of a row with zeros behind it",
    ),
    "an infinite beginning": (
        3,
        "online_softmax.py",
        "-1.0e30",
        '-float("inf")',
        "Its first tile is all -inf",
    ),
    "a vector that stays where it is": (
        4,
        "matvec.py",
        "tl.load(vector + columns, mask",
        "tl.load(vector + columns - start, mask",
        "Several tiles of columns",
    ),
    "rows of a matrix taken for neighbours": (
        4,
        "matvec.py",
        "* row_stride",
        "* num_columns",
        "Rows may lie apart",
    ),
    "no mask of columns": (
        4,
        "matvec.py",
        " & (columns < num_columns)[None, :]",
        "",
        "matrix of 4 x 13.*\n.*\nIt is NaN",
    ),
    "no mask of the stored rows": (
        4,
        "matvec.py",
        "total, mask=rows < num_rows)",
        "total)",
        "written outside of output",
    ),
    "a sum in float16": (
        4,
        "matvec.py",
        "total += tl.sum(tile * numbers[None, :], 1)",
        "total = (total + tl.sum(tile * numbers[None, :], 1)).to(tl.float16).to(tl.float32)",
        "In float16 a sum",
    ),
    "masked scores of zero": (
        5,
        "split_merge.py",
        'tl.where(mask, tl.sum(key_tile * q[None, :], 1) * scale, -float("inf"))',
        "tl.sum(key_tile * q[None, :], 1) * scale",
        "as 0 they would count",
    ),
    "an accumulator that is not rescaled": (
        5,
        "split_merge.py",
        "accumulator * rescale",
        "accumulator",
        "rescale row_sum and accumulator",
    ),
    "a split that reads on into the next": (
        5,
        "split_merge.py",
        "mask = tokens < end",
        "mask = tokens < num_tokens",
        "reaches into the next split",
    ),
    "an empty split divided by nothing": (
        5,
        "split_merge.py",
        "accumulator / tl.where(row_sum > 0, row_sum, 1.0)",
        "accumulator / row_sum",
        "the last leaves zeros",
    ),
    "a sum instead of its logarithm": (
        5,
        "split_merge.py",
        "row_max + tl.log(row_sum)",
        "row_max + row_sum",
        r"row_max \+ tl.log\(row_sum\)",
    ),
    "parts merged by exp of the bare log-sum-exp": (
        5,
        "split_merge.py",
        "tl.exp(lse - largest)",
        "tl.exp(lse)",
        "subtract the largest",
    ),
    "the first sequence's parts for all": (
        5,
        "split_merge.py",
        "lse = tl.load(partial_lse + seq * num_splits",
        "lse = tl.load(partial_lse",
        "Two sequences",
    ),
    "no part at all": (5, "split_merge.py", "tl.maximum(tl.max(lse, 0), -1.0e30)", "tl.max(lse, 0)",
                       "No part has a token"),
    "blocks taken for neighbours": (
        6,
        "paged.py",
        "table_stride + index)",
        "table_stride) + index",
        "which are no neighbours",
    ),
    "the first sequence's table for all": (
        6,
        "paged.py",
        "seq * table_stride + index",
        "index",
        "row `seq` of block_table",
    ),
    "what lies behind the last token": (
        6,
        "paged.py",
        "mask = index * BLOCK_SIZE + offsets < context_len",
        "mask = offsets >= 0",
        "NaN[^#]*The last block has two tokens",
    ),
    "every split reads all blocks": (
        6,
        "paged.py",
        "tl.minimum(begin + blocks_of_a_split, num_blocks)",
        "num_blocks",
        "which blocks does a split begin and end with",
    ),
}  # fmt: skip


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """What a step's check says of the solutions, or of a mistake in one of their files."""
    from exercises.build.check import Course, Parts, problem

    def check(number, file="", right="", wrong=""):
        name = f"solution_{tmp_path.name}"
        shutil.copytree(SOLUTIONS, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        if file:
            path = tmp_path / name / file
            text = path.read_text(encoding="utf-8")
            assert text.count(right) >= 1, right
            path.write_text(text.replace(right, wrong), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return problem(Course.named("triton").steps[number - 1], Parts(name))

    return check


@pytest.mark.parametrize("number", range(1, NUM_STEPS + 1))
def test_a_solution_passes(checked, number):
    assert checked(number) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(checked, mistake):
    number, file, right, wrong, words = MISTAKES[mistake]
    told = checked(number, file, right, wrong)
    assert told is not None, "the check passes"
    assert re.search(words, told), told


def test_the_course_has_all_its_files_and_hints():
    from exercises.build.check import Course

    course = Course.named("triton")
    assert len(course.steps) == NUM_STEPS
    for number, step in enumerate(course.steps, 1):
        path = SOLUTIONS.parents[3] / course.path(step)
        text = path.read_text(encoding="utf-8")
        assert f"\n    python -m exercises.build triton {number}\n" in text
        assert text.startswith(f'"""Step {number}: ')
        assert (SOLUTIONS / step.file).exists()
