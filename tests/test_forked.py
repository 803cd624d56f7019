"""Processes for tests begin with all that is listed for them, and hand back what they print."""

from __future__ import annotations

import sys

import pytest

import forked


def test_a_forked_process_has_everything_imported(tmp_path):
    program = tmp_path / "show.py"
    program.write_text("import sys; print(*sys.modules, sep='\\n')")
    shown = forked.run_python(program)
    assert set(forked.PRELOAD) <= set(shown.stdout.split()), "or each process imports it itself"


@pytest.mark.parametrize(("line", "code"), [("sys.exit(3)", 3), ("raise ValueError('a bug')", 1)])
def test_it_ends_as_a_fresh_python_would(tmp_path, line, code):
    program = tmp_path / "end.py"
    program.write_text(f"import sys\nprint(sys.argv[1:])\n{line}\n")
    ended = forked.run_python(program, "x")
    assert (ended.returncode, ended.stdout) == (code, "['x']\n")
    assert ("ValueError: a bug" in ended.stderr) == (code == 1)
    assert sys.argv[1:] != ["x"]
