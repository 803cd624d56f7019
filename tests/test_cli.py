"""How programs end: one line for what the user can mend, a traceback for what is in the code."""

from __future__ import annotations

import argparse

import pytest

from forked import run_python
from milestone_llm.command.cli import config_fields, run_command, try_to_write
from milestone_llm.core.errors import InputError

PROGRAM = """
import argparse, sys
from m2_batching import LLMEngine
from m2_batching.scheduler import Scheduler
from milestone_llm.command.cli import run_command

def schedule(self):
    return [rank + row for rank, row in zip([1], [2, 3], strict=True)]

def body(args):
    LLMEngine("tiny-llama", device="cpu").generate([[5, 6, 7]])

Scheduler.schedule = schedule
sys.exit(run_command(body, argparse.Namespace()))
"""


def run(body):
    return run_command(body, argparse.Namespace())


def test_a_bug_in_ones_own_scheduler_is_shown_with_file_and_line(tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(PROGRAM)
    done = run_python(program)
    assert done.returncode == 1
    assert f'File "{program}", line 8, in schedule' in done.stderr
    assert "ValueError: zip() argument 2 is longer than argument 1" in done.stderr


def test_what_the_user_can_mend_is_said_in_one_line(capsys):
    def body(args):
        raise InputError("block_size must be at least 1, got [0]")

    assert run(body) == 2
    assert capsys.readouterr().err == "error: block_size must be at least 1, got [0]\n"


@pytest.mark.parametrize("error", [ValueError, OSError, KeyError, RuntimeError])
def test_every_other_exception_is_left_alone(error):
    def body(args):
        raise error("a bug")

    with pytest.raises(error, match="a bug"):
        run(body)


def test_ctrl_c_says_what_it_did(capsys):
    def body(args):
        raise KeyboardInterrupt

    assert run(body) == 130
    assert "Unfinished requests were aborted" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_the_users(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*file/x\.json: "):
        try_to_write(tmp_path / "file" / "x.json")


def test_a_field_without_a_value_is_the_users():
    with pytest.raises(InputError, match="--set takes FIELD=VALUE, got 'block_size'"):
        config_fields(["block_size"])
