import contextlib
import functools
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from milestone_llm.lab.walkthrough.guide import Look, parse_guide
from milestone_llm.lab.walkthrough.runner import run_walkthrough

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0
"""Seconds after which a test gives up waiting for a process."""
HERE = f"{__name__.replace('.', '/')}.py"


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Queue:
    def __init__(self):
        self.items = []

    def put(self, item: int) -> int:
        self.items.append(item)
        return len(self.items)

    @logged
    def drain(
        self,
        limit: int = 2,
    ) -> list[int]:
        taken, self.items = self.items[:limit], self.items[limit:]
        return taken

    @property
    def size(self):
        return len(self.items)

    @classmethod
    def filled(cls, num_items):
        queue = cls()
        for item in range(num_items):
            queue.put(item)
        return queue

    def stream(self):
        while self.items:
            yield self.items.pop(0)

    @functools.cached_property
    def first(self):
        return self.items[0]


class ChildQueue(Queue):
    pass


def scenario():
    queue = ChildQueue.filled(4)
    queue.drain()
    assert queue.size == 2
    assert queue.first == 2
    list(queue.stream())


def guide(*stops):
    """A guide whose stops are a title, a function as `call Queue.put`, and rows of values."""
    texts = ["Title\n\nIntro."]
    for title, where, *rows in stops:
        event, function = where.split(" ", 1)
        texts.append("\n".join([f"# {title}", f"{event} {HERE}::{function}", "A note.", *rows]))
    return parse_guide("\n\n".join(texts))


def auto(*stops, work=scenario):
    return run_walkthrough(guide(*stops), work, ["--auto"])


PUT_CALLED = ("put", "call Queue.put", "p item == 0  # the item")
PUT_RETURNED = (
    "put done",
    "return Queue.put, when hits == 3",
    "p __return__ == 3  # items",
    "p self.items  # all",
    "Try `rv`.",
)
DRAINED = ("drained", "return ChildQueue.drain", "p taken == [0, 1]  # who")


def test_stops_come_in_order_with_cards_of_plain_text(capsys):
    assert auto(PUT_CALLED, PUT_RETURNED, DRAINED) == 0
    out = capsys.readouterr().out
    assert out.index("Stop 1 of 3: put") < out.index("Stop 2 of 3: put done")
    assert "test_walkthrough_runner.py::Queue.put, on return" in out
    assert "  def put(self, item: int) -> int:" in out
    assert "stopped when hits == 3" in out
    assert "p __return__\n    items\n    = 3   as expected" in out
    assert "p self.items\n    all\n    = [0, 1, 2]\n\nTry `rv`.\n" in out
    assert "3 stops, 3 values as expected." in out
    assert "\x1b" not in out
    assert str(ROOT) not in out
    assert max(map(len, out.splitlines())) <= 80
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_a_guide_that_expects_no_value_ends_without_counting_any(capsys):
    assert auto(("one", "call Queue.drain")) == 0
    assert capsys.readouterr().out.rstrip().endswith("1 stop reached.")


def test_decorated_method_shows_its_own_whole_signature(capsys):
    assert auto(DRAINED) == 0
    signature = "  def drain(\n      self,\n      limit: int = 2,\n  ) -> list[int]:\n"
    assert signature in capsys.readouterr().out


REACHED = {
    "a function may appear several times": [
        ("first", "call Queue.put", "p item == 0  # it"),
        ("second", "call Queue.put", "p item == 1  # it"),
        ("fourth", "call Queue.put, when item > 2", "p item == 3  # it"),
    ],
    "hits count from the start and not from the stop before": [
        ("second", "call Queue.put, when hits == 2", "p item == 1  # it"),
        ("fourth", "call Queue.put, when hits == 4", "p item == 3  # it"),
    ],
    "a caller returns after a stop inside it": [
        PUT_RETURNED,
        ("filled", "return Queue.filled", "p queue.size == 4  # size"),
    ],
    "wrappers and inherited methods are followed": [
        ("class method", "call ChildQueue.filled", "p num_items == 4  # n"),
        ("property", "return ChildQueue.size", "p __return__ == 2  # n"),
        ("cached property", "return ChildQueue.first", "p __return__ == 2  # n"),
    ],
    "a generator returns at each yield": [
        ("call", "call Queue.stream", "p self.items == [2, 3]  # n"),
        ("yields", "return Queue.stream", "p __return__ == 2  # item"),
        ("again", "return Queue.stream", "p __return__ == 3  # item"),
        ("end", "return Queue.stream", "p __return__ == None  # item"),
    ],
    "a condition may fail as long as it holds later": [
        ("late", "call Queue.put, when 1 / (hits - 1)", "p item == 1  # it"),
    ],
    "comprehensions see locals, and a line may be continued": [
        (
            "both",
            "call Queue.put, when len([x for x in range(9) if x in self.items]) == 2",
            "p [x for x in range(9) if x in self.items]\n  == [0, 1]\n  # in three lines",
        ),
    ],
    "an expression may compare": [
        ("equal", "call Queue.put", "p (item == 0) == True  # the last == counts"),
    ],
    "a hint may go up to the caller": [
        ("hinted", "call Queue.put", "Try `p item`, `u` (filled()), `p num_items`, `ll`."),
    ],
}


@pytest.mark.parametrize("stops", REACHED.values(), ids=REACHED)
def test_stops_where_and_finds_what_the_guide_says(stops, capsys):
    assert auto(*stops) == 0, capsys.readouterr().err


def test_differing_value_fails_and_the_rest_still_runs(capsys):
    assert auto(("wrong", "call Queue.put", "p item == 7  # it", "p item == 0  # it"), DRAINED) == 1
    captured = capsys.readouterr()
    assert "= 0   EXPECTED 7" in captured.out
    assert "Stop 2 of 2: drained" in captured.out
    assert captured.err.splitlines()[1:] == ["  stop 1 (wrong): item is 0, expected 7"]


NEVER = ("never", "call Queue.put, when item == 99", "p item  # it")
MISFITS = {
    "nothing.here is raised NameError": [("bad", "call Queue.put", "p nothing.here  # it")],
    "stop 2 (never) was never reached: ": [PUT_CALLED, NEVER, DRAINED],
    "Queue.put had 4 calls, after the stop before never": [PUT_CALLED, NEVER],
    "; nor the 1 after it": [PUT_CALLED, NEVER, DRAINED],
    "stop 2 (put) was never reached": [DRAINED, PUT_CALLED],
    "NameError: name 'missing' is not defined": [("bad", "call Queue.put, when missing > 1")],
    "bad: `p renamed` raises NameError": [("bad", "call Queue.put", "Try `ll`, `p renamed`.")],
    "bad: `p num_items, self` raises NameError": [
        ("bad", "call Queue.put", "Try `u`, `p num_items, self`.")
    ],
}


@pytest.mark.parametrize("complaint", MISFITS)
def test_what_does_not_fit_fails_and_is_named(complaint, capsys):
    assert auto(*MISFITS[complaint]) == 1
    assert complaint in capsys.readouterr().err


def test_addresses_are_hidden_and_long_values_wrapped(capsys):
    looks = ["p object()  # an object", "p list(range(99))  # many"]
    assert auto(("long", "call Queue.put", "Note. " * 40, *looks)) == 0
    out = capsys.readouterr().out
    assert "<object object at 0x...>" in out
    assert max(map(len, out.splitlines())) <= 80


def test_list_names_the_stops_without_running_or_importing(capsys):
    def work():
        raise AssertionError

    elsewhere = parse_guide("Title\n\n# far\ncall no_such/module.py::function\nNote.")
    assert run_walkthrough(elsewhere, work, ["--list"]) == 0
    assert run_walkthrough(guide(PUT_CALLED, PUT_RETURNED), work, ["--list"]) == 0
    out = capsys.readouterr().out
    assert "  1. put\n" in out
    assert "Queue.put, on return\n     when hits == 3" in out


def test_exception_of_the_scenario_goes_through():
    with pytest.raises(ZeroDivisionError):
        auto(PUT_CALLED, work=lambda: 1 // 0)


def test_interrupt_ends_in_one_line(capsys):
    def work():
        raise KeyboardInterrupt

    assert auto(PUT_CALLED, work=work) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("\nInterrupted.\n")
    assert captured.err == ""


def test_trace_function_of_others_is_restored(capsys):
    def other(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(other)
    try:
        auto(PUT_CALLED)
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("function", ["Queue", "ROOT", "select.select"])
def test_stop_needs_a_python_function(function):
    with pytest.raises(ValueError, match="needs a Python function"):
        auto(("bad", f"call {function}"))


@pytest.mark.parametrize("where", ["line Queue.put", "call Queue.put if True"])
def test_stop_is_at_call_or_return(where):
    with pytest.raises(ValueError, match=r"want `call\|return FILE::FUNCTION"):
        guide(("bad", where))


def test_value_needs_a_meaning():
    with pytest.raises(ValueError, match="got 'p item == 0'"):
        guide(("bad", "call Queue.put", "p item == 0"))


GUIDED = '''
import sys
from milestone_llm.lab.walkthrough.guide import parse_guide
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
if __name__ == "__main__":
    sys.exit(run_walkthrough(parse_guide(GUIDE), scenario))
'''


@pytest.fixture
def guided(tmp_path):
    (tmp_path / "guided.py").write_text(GUIDED)
    return tmp_path / "guided.py"


def environment(folder):
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "TERM": "dumb"}


def run(guided, typed, *options):
    done = subprocess.run(
        [sys.executable, str(guided), *options],
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(guided.parent),
        cwd=guided.parent,
    )
    assert done.stderr == "" or done.returncode
    return done.returncode, done.stdout


def test_continue_goes_from_stop_to_stop(guided):
    code, out = run(guided, "c\nrv\np __return__ + 1\nc\n")
    assert code == 0
    assert out.index("Stop 1 of 2") < out.index("-> def step(self, number)")
    assert "= 1   as expected" in out
    assert "Try `rv` (the value).\n" in out
    assert out.index("Stop 2 of 2") < out.index("(Pdb) 5\n(Pdb) 6\n")
    assert "2 stops, 2 values as expected." in out


def test_next_steps_over_and_step_goes_in(guided):
    code, out = run(guided, "n\nn\np double\ns\nq\n")
    assert code == 0
    assert "-> double = self.twice(number)" in out
    assert "-> total = double + 1\n(Pdb) 2\n" in out
    code, out = run(guided, "n\ns\nw\np number\nq\n")
    assert "-> def twice(self, number)" in out
    assert "Left after stop 1 of 2." in out


def test_return_leads_back_into_the_untraced_caller(guided):
    code, out = run(guided, "r\nn\np engine\nu\nc\nc\n")
    assert code == 0
    assert "--Return--" in out
    assert "-> for number in range(3)" in out
    assert "(Pdb) <__main__.Engine object" in out


def test_up_and_down_show_the_callers_names(guided):
    code, out = run(guided, "u\np list(number for x in [1] if engine)\nd\np self\nl\nq\n")
    assert code == 0
    assert "-> engine.step(number)" in out
    assert "(Pdb) [1]" in out
    assert "def step(self, number)" in out.split("(Pdb) ")[-2]


def test_stepping_off_the_end_does_not_enter_the_runner(guided):
    code, out = run(guided, "c\nr\n" + "n\n" * 8)
    assert code == 0
    assert "walkthrough/" not in out
    assert "bdb.py" not in out
    assert "reached" in out


def test_breakpoints_of_the_user_work_beside_the_stops(guided):
    code, out = run(guided, "b Engine.twice\nc\np number\nc\nc\nc\n")
    assert code == 0
    assert "-> return number * 2\n(Pdb) 1" in out
    assert "2 stops, 2 values as expected." in out


def test_restart_begins_again(guided):
    code, out = run(guided, "c\nrestart\nc\nc\n")
    assert code == 0
    assert out.count("Stop 1 of 2") == 2


def test_end_of_input_leaves_politely(guided):
    code, out = run(guided, "")
    assert code == 0
    assert "Left after stop 1 of 2." in out


def test_auto_needs_no_input_and_gives_the_same_twice(guided):
    first = run(guided, "", "--auto")
    assert first == run(guided, "", "--auto")
    assert first[0] == 0
    assert "(Pdb)" not in first[1]


def test_a_value_is_guessed_before_it_is_shown(guided):
    code, out = run(guided, "2\np number\nc\n5\nc\n", "--ask")
    assert code == 0
    first, second = out.split("Stop 2 of 2")
    assert "(Enter: none):     not so (asked for: a number)\n    = 1\n" in first
    assert "(Pdb) 1\n" in first
    assert "(Enter: none):     right\n    = 5\n" in second
    assert "1 of 2 guesses were right." in second
    code, out = run(guided, "\nc\n", "--ask")  # Enter, then the input ends at a question
    assert code == 0
    assert out.count("as expected") == 2
    assert "guesses" not in out
    assert "Left after stop 2 of 2." in out
    assert run(guided, "2\n", "--ask", "--auto") == run(guided, "", "--auto")


def test_it_begins_at_a_stop(guided):
    code, out = run(guided, "p 40 + 1\nc\n", "--from-stop", "2")
    assert code == 0
    assert "Stop 1 of 2" not in out
    assert "Stop 2 of 2" in out
    assert "(Pdb) 41\n" in out
    assert "1 stop, 1 value as expected." in out


@pytest.mark.parametrize(
    ("guess", "is_right"),
    [
        ("[('r0', 3)]", True),
        ('[ ("r0",3) ]', True),
        ("r0: 3", True),
        ("R0 3", True),
        ("rows", False),  # a name is no guess
        ("[('r1', 3)]", False),
        ("3 r0", False),
        ("(", False),
    ],
)
def test_a_guess_is_the_values_words_in_their_order(guess, is_right):
    assert Look("rows", "1", "").is_guessed(guess, {"rows": [("r0", 3)]}) == is_right


@pytest.mark.parametrize(
    ("value", "form"),
    [(True, "True or False"), (3, "number"), ({"r0": 1}, "a: 7"), ([], "[]"), ([4], "7 8 9")],
)
def test_the_form_of_a_guess_is_told_and_not_the_value(value, form):
    assert form in Look("value", "1", "").form({"value": value})


def test_terminal_session_with_control_d(guided):
    main, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(guided)],
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment(guided.parent),
        start_new_session=True,
    )
    os.close(child)
    typed = [b"p number + 41\n", b"\x04"]
    out = b""
    with contextlib.suppress(OSError):  # how Linux reports that the other side is closed
        while select.select([main], [], [], PATIENCE)[0] and (chunk := os.read(main, 4096)):
            out += chunk
            if typed and out.rstrip(b"\x1b[?204hl ").endswith(b"(Pdb)"):
                os.write(main, typed.pop(0))
    try:
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        os.close(main)
    assert b"42" in out
    assert b"Left after stop 1 of 2." in out
    assert b"Traceback" not in out
