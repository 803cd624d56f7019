import contextlib
import functools
import os
import pty
import select
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from milestone_llm.walkthrough.card import plain_function
from milestone_llm.walkthrough.runner import Look, Stop, run_walkthrough

ROOT = Path(__file__).parents[2]


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


class ChildQueue(Queue):
    pass


def scenario():
    queue = ChildQueue.filled(4)
    queue.drain()
    assert queue.size == 2
    list(queue.stream())


PUT_CALLED = Stop("put", Queue.put, "An item comes.", [Look("item", "the item", 0)])
PUT_RETURNED = Stop(
    "put done",
    Queue.put,
    "An item is in.",
    [Look("__return__", "items", 3), Look("self.items", "all")],
    at="return",
    when="hits == 3",
)
DRAINED = Stop("drained", ChildQueue.drain, "Some leave.", [Look("taken", "who", [0, 1])], "return")


def auto(stops, work=scenario):
    return run_walkthrough("Title", "Intro.", stops, work, ["--auto"])


def test_stops_come_in_order_with_cards_of_plain_text(capsys):
    assert auto([PUT_CALLED, PUT_RETURNED, DRAINED]) == 0
    out = capsys.readouterr().out
    assert out.index("Stop 1 of 3: put") < out.index("Stop 2 of 3: put done")
    assert "test_walkthrough_runner.py::Queue.put, on return" in out
    assert "  def put(self, item: int) -> int:" in out
    assert "stopped when hits == 3" in out
    assert "p __return__\n    items\n    = 3   as expected" in out
    assert "p self.items\n    all\n    = [0, 1, 2]\n" in out
    assert "3 stops, 3 values as expected." in out
    assert "\x1b" not in out
    assert str(ROOT) not in out
    assert max(map(len, out.splitlines())) <= 80
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_decorated_method_shows_its_own_whole_signature(capsys):
    assert auto([DRAINED]) == 0
    signature = "  def drain(\n      self,\n      limit: int = 2,\n  ) -> list[int]:\n"
    assert signature in capsys.readouterr().out


def test_a_function_may_appear_several_times(capsys):
    stops = [
        Stop("first", Queue.put, "Note.", [Look("item", "it", 0)]),
        Stop("second", Queue.put, "Note.", [Look("item", "it", 1)]),
        Stop("fourth", Queue.put, "Note.", [Look("item", "it", 3)], when="item > 2"),
    ]
    assert auto(stops) == 0


def test_hits_count_from_the_start_and_not_from_the_stop_before(capsys):
    stops = [
        Stop("second", Queue.put, "Note.", [Look("item", "it", 1)], when="hits == 2"),
        Stop("fourth", Queue.put, "Note.", [Look("item", "it", 3)], when="hits == 4"),
    ]
    assert auto(stops) == 0


def test_caller_returns_after_a_stop_inside_it(capsys):
    filled = Stop("filled", Queue.filled, "Note.", [Look("queue.size", "size", 4)], "return")
    assert auto([PUT_RETURNED, filled]) == 0


def test_properties_bound_methods_and_inherited_methods_are_followed(capsys):
    stops = [
        Stop("class method", ChildQueue.filled, "Note.", [Look("num_items", "n", 4)]),
        Stop("property", ChildQueue.size, "Note.", [Look("__return__", "n", 2)], "return"),
    ]
    assert auto(stops) == 0


def test_generator_is_called_once_and_returns_at_each_yield(capsys):
    stops = [
        Stop("call", Queue.stream, "Note.", when="hits == 1"),
        Stop("yields", Queue.stream, "Note.", [Look("__return__", "item", 2)], "return"),
        Stop("again", Queue.stream, "Note.", [Look("__return__", "item", 3)], "return"),
        Stop("end", Queue.stream, "Note.", [Look("__return__", "item", None)], "return"),
    ]
    assert auto(stops) == 0
    assert auto([Stop("resumed", Queue.stream, "Note.", when="hits == 2")]) == 1


def test_differing_value_fails_and_the_rest_still_runs(capsys):
    wrong = Stop("wrong", Queue.put, "Note.", [Look("item", "it", 7), Look("item", "it", 0)])
    assert auto([wrong, DRAINED]) == 1
    captured = capsys.readouterr()
    assert "= 0   EXPECTED 7" in captured.out
    assert "Stop 2 of 2: drained" in captured.out
    assert captured.err.splitlines()[1:] == ["  stop 1 (wrong): item is 0, expected 7"]


def test_expression_that_raises_fails(capsys):
    assert auto([Stop("wrong", Queue.put, "Note.", [Look("nothing.here", "it")])]) == 1
    assert "nothing.here is raised NameError" in capsys.readouterr().err


def test_unreached_stop_fails_and_is_named(capsys):
    never = Stop("never", Queue.put, "Note.", when="item == 99")
    assert auto([PUT_CALLED, never, DRAINED]) == 1
    error = capsys.readouterr().err
    assert "stop 2 (never) was never reached" in error
    assert "Queue.put had 4 calls" in error
    assert "nor the 1 after it" in error


def test_stop_passed_in_the_wrong_order_is_unreached(capsys):
    assert auto([DRAINED, PUT_CALLED]) == 1
    assert "stop 2 (put) was never reached" in capsys.readouterr().err


def test_condition_that_raises_is_told(capsys):
    assert auto([Stop("bad", Queue.put, "Note.", when="missing > 1")]) == 1
    assert "NameError: name 'missing' is not defined" in capsys.readouterr().err


def test_condition_may_fail_as_long_as_it_holds_later(capsys):
    stop = Stop("late", Queue.put, "Note.", when="1 / (hits - 1)", look=[Look("item", "it", 1)])
    assert auto([stop]) == 0


def test_comprehension_in_a_condition_and_a_look_sees_locals(capsys):
    expression = "[x for x in range(9) if x in self.items]"
    look = Look(expression, "items", [0, 1])
    stop = Stop("both", Queue.put, "Note.", [look], when=f"len({expression}) == 2")
    assert auto([stop]) == 0


def test_addresses_are_hidden_and_long_values_wrapped(capsys):
    looks = [Look("object()", "an object"), Look("list(range(99))", "many")]
    assert auto([Stop("long", Queue.put, "Note. " * 40, looks)]) == 0
    out = capsys.readouterr().out
    assert "<object object at 0x...>" in out
    assert max(map(len, out.splitlines())) <= 80


def test_list_names_the_stops_without_running(capsys):
    def work():
        raise AssertionError

    stops = [PUT_CALLED, PUT_RETURNED]
    assert run_walkthrough("Title", "Intro.", stops, work, ["--list"]) == 0
    out = capsys.readouterr().out
    assert "  1. put\n" in out
    assert "Queue.put, on return\n     when hits == 3" in out


def test_exception_of_the_scenario_goes_through(capsys):
    with pytest.raises(ZeroDivisionError):
        auto([PUT_CALLED], lambda: 1 // 0)


def test_trace_function_of_others_is_restored(capsys):
    def other(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(other)
    try:
        auto([PUT_CALLED])
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("thing", [Queue, len, "put", 3])
def test_stop_needs_a_python_function(thing):
    with pytest.raises(ValueError, match="needs a function"):
        Stop("bad", thing, "Note.")


def test_stop_is_at_call_or_return():
    with pytest.raises(ValueError, match="got 'line'"):
        Stop("bad", Queue.put, "Note.", at="line")  # type: ignore[arg-type]


def test_wrappers_are_taken_off():
    partial = functools.partial(contextlib.contextmanager(Queue.stream), None)
    assert plain_function(partial) is Queue.stream
    assert plain_function(functools.cached_property(Queue.drain)).__name__ == "drain"
    assert plain_function(Queue().put) is Queue.put


GUIDED = """
import sys
from m1_single.walkthrough_runner import Look, Stop, run_walkthrough

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

stops = [
    Stop("step", Engine.step, "A step.", [Look("number", "which", 1)], when="number == 1"),
    Stop("end", Engine.step, "Its end.", [Look("__return__", "sum", 5)], at="return",
         when="number == 2", commands=["rv  the value"]),
]
sys.exit(run_walkthrough("Title", "Intro.", stops, scenario))
"""


@pytest.fixture
def guided(tmp_path):
    """A script in a folder with the runner alone: importing torch would take seconds a run."""
    package = tmp_path / "m1_single"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("card", "debugger", "runner"):
        shutil.copy(ROOT / "m1_single" / f"walkthrough_{name}.py", package)
    (tmp_path / "guided.py").write_text(textwrap.dedent(GUIDED))
    return tmp_path / "guided.py"


def environment(folder):
    return {**os.environ, "PYTHONPATH": str(folder), "HOME": str(folder), "TERM": "dumb"}


def run(guided, typed, *options):
    done = subprocess.run(
        [sys.executable, str(guided), *options],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
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
    assert "Worth typing:\n  rv   the value" in out
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
    assert "walkthrough_" not in out
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
        while select.select([main], [], [], 30)[0] and (chunk := os.read(main, 4096)):
            out += chunk
            if typed and out.rstrip(b"\x1b[?204hl ").endswith(b"(Pdb)"):
                os.write(main, typed.pop(0))
    try:
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        os.close(main)
    assert b"42" in out
    assert b"Left after stop 1 of 2." in out
    assert b"Traceback" not in out
