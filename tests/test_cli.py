"""How programs end: one line for what the user can mend, a traceback for what is in the code."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.forked import run_python
from milestone_llm import MILESTONES, __version__
from milestone_llm.__main__ import main
from milestone_llm.cli import run_command
from milestone_llm.lab.demo import show

PROGRAM = """
import argparse, sys
from m2_batching import LLMEngine
from m2_batching.scheduler import Scheduler
from milestone_llm.cli import run_command

def schedule(self):
    return [rank + row for rank, row in zip([1], [2, 3], strict=True)]

def body(args):
    LLMEngine("tiny-llama", device="cpu").generate([[5, 6, 7]])

Scheduler.schedule = schedule
sys.exit(run_command(body, argparse.Namespace()))
"""


def test_a_bug_in_ones_own_scheduler_is_shown_with_file_and_line(tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(PROGRAM)
    done = run_python(program)
    assert done.returncode == 1
    assert f'File "{program}", line 8, in schedule' in done.stderr
    assert "ValueError: zip() argument 2 is longer than argument 1" in done.stderr


@pytest.mark.parametrize(
    ("library", "extra"), [("uvicorn", "serve"), ("matplotlib.figure", "plots"), ("gguf", "gguf")]
)
def test_a_library_of_an_extra_is_asked_for_in_one_line(capsys, library, extra):
    def body(args):
        raise ModuleNotFoundError(name=library)

    assert run_command(body, argparse.Namespace()) == 2
    assert f"pip install 'milestone-llm[{extra}]'" in capsys.readouterr().err


def test_any_other_library_is_missing_in_ones_own_code():
    with pytest.raises(ModuleNotFoundError, match="torchtune"):
        run_command(lambda args: bool(importlib.import_module("torchtune")), argparse.Namespace())


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("rich", "m2_batching.demo"),
        ("rich", "exercises.build m2"),
        ("rich", "exercises.museum"),
        ("torch", "exercises.build triton"),
        ("torch", "docs.tiny_engine"),
    ],
)
def test_a_python_that_is_not_the_projects_is_told_of_in_one_line(library, command):
    program = (
        f"import runpy, sys; sys.modules[{library!r}] = None; sys.argv = {command.split()}; "
        "runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    (told,) = (line for line in done.stderr.splitlines() if not line.startswith("Loading "))
    assert f"{library} is not installed" in told
    assert "make setup" in told


def test_without_matplotlib_a_demo_lacks_its_picture_alone(capsys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("milestone_llm.lab.plots."):
            monkeypatch.delitem(sys.modules, name)
        elif name.split(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    show.timeline([], Path("timeline.png"))
    assert "no timeline" in (out := capsys.readouterr().out)
    assert "pip install 'milestone-llm[plots]'" in out


BASE_ALONE = """
import importlib, sys
for name in list(sys.modules):  # this process was forked from one that has imported all of them
    if name.split(".")[0] in {blocked}:
        sys.modules[name] = None
    elif name.split(".")[0] in ("milestone_llm", *{milestones}):
        del sys.modules[name]
sys.modules.update(dict.fromkeys({blocked}))
for milestone in {milestones}:
    for door in ("demo", "walkthrough", "bench", "serve"):
        importlib.import_module(f"{{milestone}}.{{door}}")
    importlib.import_module(f"{{milestone}}.engine").LLMEngine("tiny-llama").generate([[5, 6]])
"""


def test_the_base_install_runs_all_engines(tmp_path):
    """The doors are there, too: they answer `--help`, and say what they lack."""
    extras = [
        *("fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"),
        *("matplotlib", "gguf", "accelerate", "ray"),
    ]
    program = tmp_path / "base.py"
    program.write_text(BASE_ALONE.format(blocked=extras, milestones=MILESTONES))
    done = run_python(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["--milestone", "m2", "serve"], "m2_batching.serve"),
        (["demo"], "m5_kernels.demo"),
        (["explore"], "milestone_llm.lab.explorer"),
        (["play"], "milestone_llm.lab.playground"),
    ],
)
def test_one_command_starts_all_programs(capsys, words, program):
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    assert f"usage: python -m {program} " in capsys.readouterr().out


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"milestone-llm {__version__}\n"
