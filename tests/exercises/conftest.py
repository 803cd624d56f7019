"""Finds the reader's class in `exercises/` and the one that comes with the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"yours": ROOT / "exercises", "solution": Path(__file__).parent / "solutions"}


def class_of(whose: str, file: str, name: str) -> Any:
    path = FOLDERS[whose] / file
    spec = importlib.util.spec_from_file_location(f"{whose}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """An exercise that nobody has begun is skipped; one that is wrong fails."""
    outcome = yield
    error = outcome.excinfo
    if error is not None and issubclass(error[0], NotImplementedError):
        outcome.force_exception(pytest.skip.Exception("not solved yet", _use_item_location=True))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`exercise` is the reader's class, then the solution; the module names file and class."""
    if "exercise" in metafunc.fixturenames:
        file, name = metafunc.module.EXERCISE
        classes = [class_of(whose, file, name) for whose in FOLDERS]
        metafunc.parametrize("exercise", classes, ids=list(FOLDERS))
