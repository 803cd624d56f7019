"""The course of Triton: its solutions pass, and mistakes are told.

Kernels run on a GPU or under Triton's interpreter, which must be chosen before anything imports
triton. So this file runs in a process with TRITON_INTERPRET=1.
"""

import ast
import importlib
import re

import pytest
import torch

from exercises.build.check import FOLDER, Course, Parts, problem
from m5_kernels.kernels.triton_or_twin import HAS_TRITON, INTERPRETED

from .conftest import FOLDERS

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (INTERPRETED or torch.cuda.is_available())),
    reason="runs in a process of its own, under Triton's interpreter",
)

NUM_STEPS = 6
INFINITE = 'other=-float("inf")'

MISTAKES = {  # step, what stands there, the mistake, words of what is told
    "a row without a mask": (
        1, ", mask=columns < num_columns, other=0.0)", ")",
        "3 rows of 5 columns\n.*\nThe kernel has read what lies behind"),
    "a mask and no word on what it leaves out": (
        1, ", other=0.0)", ")",
        "3 rows of 5 columns\n.*nan.*\n.*What the mask leaves out is undefined"),
    "rows taken for neighbours": (1, "row * row_stride", "row * num_columns", "Rows may lie apart"),
    "nothing stored": (
        1, "    tl.store(output + row, tl.sum(tile, 0))\n", "", "Nothing was written"),
    "a misspelt operation": (1, "tl.sum(", "tl.add_up(", "AttributeError: .*add_up"),
    "masked elements that are zeros": (
        2, INFINITE, "other=0.0", "softmax of a row with zeros behind it"),
    "no maximum": (2, "tile - tl.max(tile, 0)", "tile", "0 / 0 is NaN: subtract"),
    "a store without a mask": (
        2, "tl.sum(weights, 0), mask=mask)", "tl.sum(weights, 0))", "written outside of output"),
    "no rescaling": (3, "row_sum * rescale", "row_sum", "The falling row was right"),
    "an infinite beginning": (3, "-1.0e30", '-float("inf")', "Its first tile is all -inf"),
    "a vector that stays where it is": (
        4, "tl.load(vector + columns, mask", "tl.load(vector + columns - start, mask",
        "Several tiles of columns"),
    "a sum in float16": (
        4, "total += tl.sum(tile * numbers[None, :], 1)",
        "total = (total + tl.sum(tile * numbers[None, :], 1)).to(tl.float16).to(tl.float32)",
        "In float16 a sum"),
    "masked scores of zero": (
        5, f"tl.where(mask, tl.sum(key_tile * q[None, :], 1) * scale, {INFINITE[6:]})",
        "tl.sum(key_tile * q[None, :], 1) * scale", "as 0 they would count"),
    "a split that reads on into the next": (
        5, "mask = tokens < end", "mask = tokens < num_tokens", "reaches into the next split"),
    "an empty split divided by nothing": (
        5, "accumulator / tl.where(row_sum > 0, row_sum, 1.0)", "accumulator / row_sum",
        "the last leaves zeros"),
    "parts merged by exp of the bare log-sum-exp": (
        5, "tl.exp(lse - largest)", "tl.exp(lse)", "subtract the largest"),
    "the first sequence's parts for all": (
        5, "lse = tl.load(partial_lse + seq * num_splits", "lse = tl.load(partial_lse",
        "Two sequences"),
    "blocks taken for neighbours": (
        6, "table_stride + index)", "table_stride) + index", "which are no neighbours"),
    "what lies behind the last token": (
        6, "mask = index * BLOCK_SIZE + offsets < context_len", "mask = offsets >= 0",
        "NaN[^#]*The last block has two tokens"),
    "an accumulator that is not rescaled": (
        6, "accumulator * rescale", "accumulator", "Four blocks: rescale row_sum and accumulator"),
    "every split reads all blocks": (
        6, "tl.minimum(begin + blocks_of_a_split, num_blocks)", "num_blocks",
        "which blocks does a split begin and end with"),
}  # fmt: skip


def kernels(text):
    """The kernels of a file, by name: their first line, and the one after their last."""
    return {
        node.name: (node.decorator_list[0].lineno - 1, node.end_lineno)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }


def solved(text):
    """A file of the course with the kernels of the solutions, and without its `raise`s."""
    solutions = (FOLDERS["solution"] / "build_triton.py").read_text(encoding="utf-8")
    lines, own, given = text.splitlines(), kernels(text), kernels(solutions)
    changes = [(*own[name], solutions.splitlines()[slice(*given[name])]) for name in own]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise):
            changes.append((node.lineno - 1, node.end_lineno, []))
    for begin, end, instead in sorted(changes, reverse=True):
        lines[begin:end] = instead
    return "\n".join(lines) + "\n"


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """What a step's check says of the solutions, or of a mistake in one of their files."""
    course = Course.named("triton")
    assert len(course.steps) == NUM_STEPS

    def check(number, right="", wrong=""):
        step, folder = course.steps[number - 1], tmp_path / f"solution_{tmp_path.name}"
        folder.mkdir()
        for file in {each.file for each in course.steps}:
            text = solved((FOLDER / "triton" / file).read_text(encoding="utf-8"))
            if file == step.file:
                assert right in text
                text = text.replace(right, wrong) if right else text
            (folder / file).write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return problem(step, Parts(folder.name))

    return check


@pytest.mark.parametrize("number", range(1, NUM_STEPS + 1))
def test_a_solution_passes(checked, number):
    assert checked(number) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(checked, mistake):
    *place, words = MISTAKES[mistake]
    told = checked(*place)
    assert told is not None, "the check passes"
    assert re.search(words, told), told
