"""The checks of an exercise tell apart code that is missing, wrong and right."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parent / "conftest.py"
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


@pytest.fixture
def run(pytester):
    """Writes a small exercise with a test and a solution; runs the test on the reader's code."""
    pytester.path.joinpath("exercises").mkdir()
    folder = pytester.path / "tests" / "exercises"
    (folder / "solutions").mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"))
    (folder / "test_double.py").write_text(TEST)
    (folder / "solutions" / "double.py").write_text(SOLUTION)

    def run(code, *arguments):
        (pytester.path / "exercises" / "double.py").write_text(code)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)

    return run


NAMED = "tests/exercises/test_double.py"
UNSOLVED = "def double(x):\n    raise NotImplementedError\n"


def test_whoever_names_the_file_is_told_once_what_to_do(run):
    result = run(UNSOLVED, NAMED)
    result.assert_outcomes(failed=1, skipped=1, passed=2)
    result.stdout.fnmatch_lines(
        [
            "Not solved yet: double() in exercises/double.py, line 2, raises *",
            "double of 4: yours -, before 4, solution 8",
        ]
    )


def test_a_run_of_all_tests_skips_what_nobody_has_begun(run):
    result = run(UNSOLVED, "tests")
    result.assert_outcomes(skipped=2, passed=2)
    result.stdout.no_fnmatch_line("*before 4*")


def test_a_wrong_answer_fails_everywhere_and_says_why(run):
    wrong = "def double(x):\n    return x\n"
    for arguments in (NAMED, "tests"):
        result = run(wrong, arguments)
        result.assert_outcomes(failed=1, passed=3)
        result.stdout.fnmatch_lines(["*AssertionError: double(4) is 8, yours is 4*"])


def test_a_right_answer_passes_and_its_figure_is_shown(run):
    result = run(SOLUTION, NAMED)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["double of 4: yours 8, before 4, solution 8"])


def test_an_operation_that_the_library_lacks_is_no_missing_solution(run):
    code = "def double(x):\n    raise NotImplementedError('could not run doubling on meta')\n"
    result = run(code, NAMED)
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.no_fnmatch_line("*Not solved yet*")


NEEDS_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available() or not HAS_TRITON, reason="no kernel is interpreted here"
)


@NEEDS_INTERPRETER
def test_whoever_names_the_test_of_a_kernel_gets_the_interpreter(pytester, run, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = "import os\ndef test_it():\n    assert os.environ['TRITON_INTERPRET'] == '1'\n"
    for name in ("test_build_triton.py", "test_another.py"):
        (pytester.path / "tests" / "exercises" / name).write_text(code)
    assert run(SOLUTION, "tests/exercises/test_build_triton.py").ret == 0
    assert run(SOLUTION, "tests/exercises/test_another.py").ret == 1


EXERCISE_FOLDER = CONFTEST.parents[2] / "exercises"


def test_an_exercise_without_tensors_does_not_wait_for_torch():
    program = (
        "import sys, pytest; pytest.main(['--collect-only', '-p', 'no:cacheprovider', "
        "'tests/exercises/test_m1_sorted_batches.py', 'tests/exercises/test_m4_eviction.py']); "
        "sys.exit(str(sorted({'torch', 'transformers'} & set(sys.modules)) or ''))"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=CONFTEST.parents[2], capture_output=True, text=True)
    assert run.stderr.strip() == ""
    assert "test_every_request_gets_all_its_tokens" in run.stdout


# --- every exercise has all that belongs to it ---------------------------------------------------

EXERCISES = [
    path for path in sorted(EXERCISE_FOLDER.glob("*.py")) if not path.stem.endswith("_engine")
]


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_an_exercise_is_whole(path):
    """It names its command, has a hint, a solution and tests of wrong answers, and is linked."""
    root, text = path.parents[1], path.read_text(encoding="utf-8")
    test = root / "tests" / "exercises" / f"test_{path.stem}.py"
    assert f"\n    python -m pytest {test.relative_to(root).as_posix()}\n" in text
    assert "Hint: " in text
    assert (CONFTEST.parent / "solutions" / path.name).exists()
    wrong_answers = re.findall(
        r"^def test_\w*(?:caught|told)\w*\(", test.read_text(encoding="utf-8"), flags=re.M
    )
    assert wrong_answers, f"{test.name} has no test of a wrong answer"
    assert "figure(" in test.read_text(encoding="utf-8")
    assert f"({path.name})" in (root / "exercises" / "README.md").read_text(encoding="utf-8")
    chapters = [page.read_text(encoding="utf-8") for page in (root / "docs").glob("*.md")]
    assert any(f"(../exercises/{path.name})" in chapter for chapter in chapters)
