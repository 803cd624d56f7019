"""Sessions of a walkthrough: pdb with a guide. What its cards look like is in docs/transcripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from milestone_llm.lab.walkthrough.guide import Look, parse_guide
from milestone_llm.lab.walkthrough.runner import run_walkthrough

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from milestone_llm.lab.walkthrough.runner import run_walkthrough

class Engine:
    def step(self, number):
        double = self.twice(number)
        total = double + 1
        return total

    def twice(self, number):
        return number * 2

def scenario():
    engine = Engine()
    for number in range(3):
        engine.step(number)
    end = "reached"

if __name__ == "__main__":
    sys.exit(run_walkthrough(Path(__file__).with_name("guide.txt").read_text(), scenario))
"""
GUIDE = """Title

Intro.

# step
call __main__.py::Engine.step, when number == 1
A step.
p number == 1  # which

# end
return __main__.py::Engine.step, when number == 2
Its end.
p __return__ == 5  # sum
Try `rv` (the value).
"""


def run(folder: Path, typed: str, *options: str, guide: str = GUIDE) -> tuple[int, str, str]:
    """Exit code and what was printed of a session in which this is typed."""
    (folder / "guided.py").write_text(PROGRAM)
    (folder / "guide.txt").write_text(guide)
    done = subprocess.run(
        [sys.executable, "guided.py", *options],
        input=typed,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "TERM": "dumb"},
        cwd=folder,
    )
    return done.returncode, done.stdout, done.stderr


SESSIONS = {
    "continue goes from stop to stop": (
        "c\nrv\np __return__ + 1\nc\n",
        ["Stop 1 of 2", "= 1   as expected", "-> def step(self, number)", "Stop 2 of 2",
         "(Pdb) 5\n(Pdb) 6\n", "2 stops, 2 values as expected."],
    ),
    "next goes over a call, step into it, return to the caller": (
        "n\ns\nr\nn\np double\nq\n",
        ["-> double = self.twice(number)", "-> def twice(self, number)", "--Return--", "(Pdb) 2\n",
         "Left after stop 1"],
    ),
    "return leads into the caller, which was not traced": (
        "r\nn\np engine\nc\nc\n",
        ["--Return--", "-> for number in range(3)", "(Pdb) <__main__.Engine object"],
    ),
    "up shows the caller's names, also in a comprehension": (
        "u\np list(number for x in [1] if engine)\nd\np number + 6\nq\n",
        ["-> engine.step(number)", "(Pdb) [1]", "(Pdb) 7"],
    ),
    "stepping off the end does not enter the runner": ("c\nr\n" + "n\n" * 8, ["reached"]),
    "breakpoints of the user's own work beside the stops": (
        "b Engine.twice\nc\np number\nc\nc\nc\n",
        ["-> return number * 2\n(Pdb) 1", "2 stops, 2 values as expected."],
    ),
    "restart begins again": ("c\nrestart\nc\nc\n", ["Stop 1 of 2", "Stop 2 of 2", "Stop 1 of 2"]),
    "the input may end anywhere": ("", ["Stop 1 of 2", "Left after stop 1 of 2."]),
}  # fmt: skip


def assert_in_order(texts: list[str], out: str) -> None:
    place = 0
    for text in texts:
        assert text in out[place:], out
        place = out.index(text, place) + len(text)


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session(session, tmp_path):
    typed, wanted = SESSIONS[session]
    code, out, err = run(tmp_path, typed)
    assert (code, err) == (0, "")
    assert_in_order(wanted, out)
    assert "walkthrough/" not in out
    assert "bdb.py" not in out


def test_a_value_is_guessed_before_it_is_shown(tmp_path):
    code, out, _ = run(tmp_path, "2\np number\nc\n5\nc\n", "--ask")
    assert code == 0
    assert_in_order(["not so", "= 1\n", "(Pdb) 1\n", "Stop 2 of 2", "right", "= 5\n"], out)
    assert "1 of 2 guesses were right." in out
    _, out, _ = run(tmp_path, "\nc\n", "--ask", "--from-stop", "2")  # the input ends at a question
    assert "Stop 1 of 2" not in out
    assert_in_order(["as expected", "1 stop, 1 value as expected."], out)


MISFITS = {
    "a value": ("p number == 1", "p number == 7", "stop 1 (step): number is 1, expected 7"),
    "an expression": ("p number == 1", "p no.where", "no.where is raised NameError"),
    "a condition": ("number == 1", "missing > 1", "name 'missing' is not defined"),
    "a stop": ("number == 1", "number == 99", "stop 1 (step) was never reached"),
    "a hint": ("Try `rv`", "Try `u`, `p self`", "end: `p self` raises NameError"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_the_code_is_named(misfit, tmp_path):
    fitting, other, complaint = MISFITS[misfit]
    code, out, err = run(tmp_path, "", "--auto", guide=GUIDE.replace(fitting, other))
    assert code == 1
    assert complaint in err
    assert ("Stop 2 of 2" in out) == ("never reached" not in err)


def test_what_the_scenario_raises_is_raised_and_ctrl_c_is_an_end(capsys):
    guide = "Title\n\n# never\ncall json/__init__.py::dumps\nNote."
    with pytest.raises(ZeroDivisionError):
        run_walkthrough(guide, lambda: 1 // 0, ["--auto"])

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run_walkthrough(guide, interrupted, ["--auto"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("guess", "is_right"),
    [('[ ("r0",3) ]', True), ("R0 3", True), ("[('r1', 3)]", False), ("3 r0", False), ("(", False)],
)
def test_a_guess_is_the_values_words_in_their_order(guess, is_right):
    assert Look("rows", "", "").is_guessed(guess, {"rows": [("r0", 3)]}) == is_right


@pytest.mark.parametrize(
    ("guess", "is_right"),
    [
        ("{'r0': [0, 1], 'r1': [2]}", True),
        ("r1: 2, r0: 0 1", True),
        ("r0 1 0, r1 2", False),
        ("r0 2, r1 0 1", False),
        ("r0 0 1", False),
    ],
)
def test_a_dict_is_guessed_in_any_order(guess, is_right):
    assert (
        Look("tables", "", "").is_guessed(guess, {"tables": {"r0": [0, 1], "r1": [2]}}) == is_right
    )


@pytest.mark.parametrize("stop", ["call Queue.put", "line f.py::f", "call f.py::f\np item == 0"])
def test_a_guide_that_is_written_otherwise_is_refused(stop):
    with pytest.raises(ValueError, match="want `"):
        parse_guide(f"Title\n\n# a stop\n{stop}")
