"""The checks of an exercise tell apart code that is missing, wrong and right."""

from pathlib import Path

import pytest

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
