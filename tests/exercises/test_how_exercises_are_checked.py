"""The checks of an exercise tell apart code that is missing, wrong and right."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXERCISES = [path.stem for path in sorted((ROOT / "exercises").glob("*.py"))]


# --- each exercise -------------------------------------------------------------------------------


def calls_of(function):
    """Arguments with which pytest would call a test, beside its fixtures."""
    rows = [{}]
    for mark in getattr(function, "pytestmark", []):
        names, values = mark.args[:2]
        names = [names] if isinstance(names, str) else names
        own = [dict(zip(names, v if len(names) > 1 else [v], strict=True)) for v in values]
        rows = [{**row, **more} for row, more in itertools.product(rows, own)]
    return rows


@pytest.mark.parametrize("name", EXERCISES)
def test_a_wrong_answer_is_told(name):
    spec = importlib.util.spec_from_file_location(f"wrong_{name}", HERE / f"test_{name}.py")
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    told = []
    for function in (each for each in vars(tests).values() if hasattr(each, "__code__")):
        if function.__name__.startswith("test_"):
            given = {"exercise": tests.WRONG, "figure": lambda *noted: None}
            wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
            for row in calls_of(function):
                try:
                    function(**{each: {**given, **row}[each] for each in wanted})
                except AssertionError as error:
                    told.append(str(error))
    assert re.search(tests.TOLD, "\n".join(told)), told


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_is_whole(name):
    """It names its command, has a hint and a solution, and is linked."""
    text = (ROOT / "exercises" / f"{name}.py").read_text(encoding="utf-8")
    assert f"\n    python -m pytest tests/exercises/test_{name}.py\n" in text
    assert "Hint: " in text
    assert (HERE / "solutions" / f"{name}.py").exists()
    assert f"({name}.py)" in (ROOT / "exercises" / "README.md").read_text(encoding="utf-8")
    chapters = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert any(f"(../exercises/{name}.py)" in chapter for chapter in chapters)


def test_an_exercise_without_tensors_does_not_wait_for_torch():
    program = (
        "import sys, pytest; pytest.main(['--collect-only', '-p', 'no:cacheprovider', "
        "'tests/exercises/test_m1_sorted_batches.py', 'tests/exercises/test_m4_eviction.py']); "
        "sys.exit(str(sorted({'torch', 'transformers'} & set(sys.modules)) or ''))"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.stderr.strip() == ""
    assert "test_every_request_gets_all_its_tokens" in run.stdout


# --- what a reader sees --------------------------------------------------------------------------

TEST = """
EXERCISE = ("double.py", "double")

def test_doubles(exercise, figure):
    result = exercise(4)
    figure("double of 4", str(result), "4")
    assert result == 8, f"double(4) is 8, yours is {result}"

def test_doubles_nothing(exercise):
    assert exercise(0) == 0
"""
SOLUTION = "def double(x):\n    return 2 * x\n"
UNSOLVED = "def double(x):\n    raise NotImplementedError\n"
NAMED = "tests/exercises/test_double.py"


@pytest.fixture
def run(pytester):
    """Writes a small exercise with a test and a solution; runs the test on the reader's code."""
    pytester.path.joinpath("exercises").mkdir()
    folder = pytester.path / "tests" / "exercises"
    (folder / "solutions").mkdir(parents=True)
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text(encoding="utf-8"))
    (folder / "test_double.py").write_text(TEST)
    (folder / "solutions" / "double.py").write_text(SOLUTION)

    def run(code, *arguments):
        (pytester.path / "exercises" / "double.py").write_text(code)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)

    return run


def test_a_reader_is_told_what_to_do_and_then_how_the_answer_compares(run):
    result = run(UNSOLVED, NAMED)
    result.assert_outcomes(failed=1, skipped=1, passed=2)
    result.stdout.fnmatch_lines(
        [
            "Not solved yet: double() in exercises/double.py, line 2, raises *",
            "double of 4: yours -, before 4, solution 8",
        ]
    )
    result = run(SOLUTION, NAMED)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["double of 4: yours 8, before 4, solution 8"])


def test_an_operation_that_the_library_lacks_is_no_missing_solution(run):
    code = "def double(x):\n    raise NotImplementedError('could not run doubling on meta')\n"
    run(code, NAMED).assert_outcomes(failed=2, passed=2)
