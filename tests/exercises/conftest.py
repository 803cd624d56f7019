"""Run every check on the reader's code in `exercises/` and on the solution in `solutions/`.

A test file names its exercise: `EXERCISE = ("m1_sorted_batches.py", "SortedScheduler")`. A test
with the fixture `exercise` runs twice, with the reader's code and with the solution. With `figure`
it records a number, which is printed at the end next to the number of the code before.

Code that has not been written yet raises NotImplementedError. Such a test is skipped, so that
`make test` stays green. A reader who names the test file on the command line is told what to do.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"yours": ROOT / "exercises", "solution": Path(__file__).parent / "solutions"}

TOLD = pytest.StashKey[set[Path]]()
"""Test files whose reader has been told that the exercise is not solved."""
FIGURES = pytest.StashKey[dict[tuple[Path, str, str], dict[str, str]]]()
"""By test file, what is measured, and the figure before: the figures of `yours` and `solution`."""


def part_of(whose: str, file: str, name: str) -> Any:
    """Return a class or function of an exercise's file."""
    path = FOLDERS[whose] / file
    spec = importlib.util.spec_from_file_location(f"{whose}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def is_named(path: Path, config: pytest.Config) -> bool:
    """Return whether the command line names this very file, and not only its folder."""
    start = config.invocation_params.dir
    return path in {(start / argument.partition("::")[0]).resolve() for argument in config.args}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with `exercise` for the reader's code, then for the solution."""
    if "exercise" in metafunc.fixturenames:
        file, name = metafunc.module.EXERCISE
        parts = [part_of(whose, file, name) for whose in FOLDERS]
        metafunc.parametrize("exercise", parts, ids=list(FOLDERS))


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Skip a test of an unsolved exercise. If its file was named, fail with a hint how to begin."""
    outcome = yield
    error = outcome.excinfo
    if error is None or not issubclass(error[0], NotImplementedError) or str(error[1]):
        return  # torch raises it with a text when it lacks an operation
    place = traceback.extract_tb(error[2])[-1]
    if Path(place.filename).parent != FOLDERS["yours"]:
        return
    path, config = pyfuncitem.path, pyfuncitem.config
    told = config.stash.setdefault(TOLD, set())
    if path in told or not is_named(path, config):
        reason = "not solved yet"
        outcome.force_exception(pytest.skip.Exception(reason, _use_item_location=True))
        return
    told.add(path)
    file = Path(place.filename).relative_to(ROOT).as_posix()
    text = (
        f"Not solved yet: {place.name}() in {file}, line {place.lineno}, raises "
        f"NotImplementedError.\nRead the task at the top of {file}, write the code in place of "
        f"that line, and run this again.\nThe docstring of {place.name}() has a hint; a solution "
        f"is in tests/exercises/solutions/."
    )
    outcome.force_exception(pytest.fail.Exception(text, pytrace=False))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Return a function that records a figure: what is measured, its value, and the value
    before."""
    figures = request.config.stash.setdefault(FIGURES, {})
    whose = next(name for name in FOLDERS if name in request.node.callspec.id.split("-"))

    def note(what: str, value: str, before: str) -> None:
        figures.setdefault((request.path, what, before), {})[whose] = value

    return note


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the reader's figures next to those before, for test files named on the command line."""
    figures = config.stash.get(FIGURES, {})
    lines = [
        f"{what}: yours {values.get('yours', '-')}, before {before}, "
        f"solution {values.get('solution', '-')}"
        for (path, what, before), values in figures.items()
        if is_named(path, config)
    ]
    if lines:
        terminalreporter.section("your figures")
        for line in lines:
            terminalreporter.write_line(line)
