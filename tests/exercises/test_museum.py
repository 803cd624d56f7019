"""The museum of bugs: each broken engine shows its symptom, the healthy one does not, and the named
invariant and test catch it.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import gzip
import importlib.util
import json
import re
import sys
from unittest import mock

import pytest

from exercises.museum import invariants, show
from exercises.museum.__main__ import main
from exercises.museum.exhibit import Exhibit, Run
from exercises.museum.lines import lines
from exercises.museum.rooms import NAMES, exhibit

from .conftest import ROOT

ALARMS = {"block_too_late", "shared_unwritten"}
WRONG = {
    "free_blocks_fall": {"d"},
    "equal_prompts": {"b"},
    "asked_again": {"again"},
    "anothers_words": {"c"},
    "second_turn": {"one+"},
    "crafted_prompt": {"b"},
    "tokens_too_many": {"long"},
    "seam": {"b"},
    "next_steps_rows": {"b"},
    "past_the_end": {"a"},
    "recycled_row": {"c"},
    "runs_past_stop": {"a"},
    "anothers_stream": {"r0"},
}
"""Whose tokens are not those that they get alone; in the other exhibits nobody's."""
INVARIANTS = [
    getattr(invariants, node.name)
    for node in ast.parse((ROOT / "exercises/museum/invariants.py").read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef)
]

each = pytest.mark.parametrize("name", NAMES)


@functools.cache
def run(name: str, is_changed: bool) -> Run:
    """A run of an exhibit, made once for all tests."""
    return exhibit(name).run(is_changed)


@functools.cache
def alone(name: str) -> Run:
    """What M1 makes of an exhibit's requests, one by one."""
    return exhibit(name).alone()


def wrong(name: str, is_changed: bool) -> set[str]:
    """Whose tokens are not those that they get alone."""
    right, tokens = alone(name).tokens, run(name, is_changed).tokens
    return {who for who in right if tokens.get(who) != right[who]}


@each
def test_the_healthy_engine_is_right_and_no_invariant_says_otherwise(name):
    healthy = run(name, False)
    assert wrong(name, False) == set()
    assert healthy.texts == alone(name).texts
    assert (healthy.check, healthy.raised) == ("", "")
    for invariant in INVARIANTS:
        assert list(invariant(healthy)) == [], invariant.__name__


@each
def test_the_broken_engine_is_wrong_where_the_exhibit_says(name):
    assert wrong(name, True) == WRONG.get(name, set())


def test_what_is_wrong_where_all_tokens_are_right():
    """Somebody waits for nothing, or computes in vain; a block too early is only a waste."""

    def first_step(name, is_changed, who):
        records = run(name, is_changed).records
        return next(r.step for r in records if any(row.request_id == who for row in r.batch))

    assert [first_step("waits_for_nothing", changed, "b") for changed in (False, True)] == [1, 8]
    for is_changed, num_preemptions in ((False, 0), (True, 4)):
        records = run("in_and_out", is_changed).records
        assert sum(len(record.preempted) for record in records) == num_preemptions
    for name in ALARMS:
        assert num_allocated(run(name, True)) > num_allocated(run(name, False))


def num_allocated(run: Run) -> int:
    events = (event for record in run.records for event in record.events)
    return sum(len(event.blocks) for event in events if event.type == "alloc")


@each
def test_the_invariant_finds_the_line_in_question(name):
    own = exhibit(name)
    assert own.is_false_alarm == (name in ALARMS)
    suspect, other = run(name, not own.is_false_alarm), run(name, own.is_false_alarm)
    found = show.line_in_question(own, suspect)
    step, line = re.fullmatch(r"step (\d+): (.+)", found).groups()
    is_outside = name == "anothers_stream"  # the trace is right, and what callers got is not
    others = [text for record in other.records[int(step) :][:1] for text in lines(record)]
    assert (line in others) == is_outside
    assert own.is_false_alarm or list(own.invariant(other)) == []


def test_the_engines_own_check_catches_lost_blocks_and_nothing_else():
    assert {name for name in NAMES if run(name, True).check} == {"free_blocks_fall"}
    assert run("free_blocks_fall", True).check == "step 1: block 1: 0 tables, count 1"
    assert "the plan is empty" in run("free_blocks_fall", True).raised


# --- the test that would have caught it ----------------------------------------------------------

TOO_SLOW = {"free_blocks_fall", "recycled_row", "seam"}
"""Random runs, and an engine with its steps under way: what they say was seen once."""


@contextlib.contextmanager
def swapped(own: Exhibit):
    """Within, the broken class stands wherever a module has the right one under its name."""
    module, _, name = own.place.rpartition(".")
    right = getattr(sys.modules[module], name)
    with contextlib.ExitStack() as stack:
        for each in list(sys.modules.values()):
            is_there = getattr(each, "__dict__", {}).get(name) is right
            if is_there and not each.__name__.startswith("exercises"):
                stack.enter_context(mock.patch.object(each, name, own.broken))
        yield


def cases(function) -> list[dict[str, object]]:
    """Arguments with which pytest would call a test."""
    calls: list[dict[str, object]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        names, values = mark.args[:2]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        rows = [value if len(names) > 1 else (value,) for value in values]
        calls = [{**call, **dict(zip(names, row, strict=True))} for call in calls for row in rows]
    return calls


@pytest.mark.parametrize("name", [name for name in NAMES if name != "next_steps_rows"])
def test_the_named_test_fails_with_this_bug(name):
    own = exhibit(name)
    path, _, test = own.card["test"].partition("::")
    assert f"def {test}(" in (ROOT / path).read_text("utf-8")
    if name in TOO_SLOW:
        return
    spec = importlib.util.spec_from_file_location(f"museum_{name}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: module}):
        spec.loader.exec_module(module)
        function = getattr(module, test)
        with swapped(own):
            assert any(fails(function, arguments) for arguments in cases(function))


def fails(function, arguments) -> bool:
    try:
        function(**arguments)
    except Exception:
        return True
    return False


# --- what an exhibit is --------------------------------------------------------------------------


@each
def test_an_exhibit_is_a_short_file_with_one_method_that_is_not_ours(name):
    text = (ROOT / "exercises" / "museum" / f"{name}.py").read_text("utf-8")
    own = exhibit(name)
    assert len(text.splitlines()) <= 80
    if isinstance(own.broken, type):
        (base,) = own.broken.__bases__
        assert [n for n, v in vars(own.broken).items() if callable(v) and hasattr(base, n)] == [
            next(n for n, v in vars(own.broken).items() if callable(v))
        ]
    words = ["question", "cause", "invariant", "fix", "test", "seen", "threads"]
    assert list(own.card) == words
    for thread in own.card["threads"].split(", "):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+ \((merged|closed|open)\)", thread)


def test_every_room_has_something():
    assert set(NAMES) == {path.stem for path in (ROOT / "exercises/museum").glob("*.py")} - {
        *("__init__", "__main__", "exhibit", "invariants", "lines", "rooms", "show", "slow_device")
    }
    numbers = {name: number for number, name in enumerate(NAMES, 1)}
    assert (numbers["equal_prompts"], numbers["shared_unwritten"]) == (3, 8)  # cards name them
    assert numbers["next_steps_rows"] == 13  # an exercise does
    assert len(NAMES) >= 16


# --- a visit -------------------------------------------------------------------------------------


@pytest.fixture
def visit(monkeypatch, capsys):
    """The program, with the runs that the tests have made."""
    names = {id(exhibit(name)): name for name in NAMES}
    runs = {(name, changed): run(name, changed) for name in NAMES for changed in (False, True)}
    monkeypatch.setattr(
        Exhibit, "run", lambda own, is_changed, **_: runs[names[id(own)], is_changed]
    )
    alones = {name: alone(name) for name in NAMES}
    monkeypatch.setattr(Exhibit, "alone", lambda own: alones[names[id(own)]])

    def call(*arguments: str) -> str:
        capsys.readouterr()
        assert main(arguments) == 0
        return capsys.readouterr().out

    return call


def test_the_rooms(visit):
    text = visit()
    assert all(show.SYMPTOMS[name] in text for name in NAMES)
    with pytest.raises(SystemExit):
        main([str(len(NAMES) + 1)])


@each
def test_the_card_comes_after_the_question_and_when_asked_for(name, visit):
    number, own = str(NAMES.index(name) + 1), exhibit(name)
    text = visit(number)
    assert " ".join(own.card["question"].split()) in " ".join(text.split())
    assert "The card ──" not in text
    for secret in (own.card["cause"], own.card["fix"]):
        assert secret[:30] not in text
    text = visit(number, "--card")
    assert text.index(own.card["question"][:20]) < text.index("The card ──")
    assert own.card["cause"][:30] in text


def test_enter_shows_the_card_to_who_sits_at_a_terminal(visit, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda *prompt: "")
    assert "The card ──" in visit("3")


def test_all_exhibits_in_one_list(visit):
    text = visit("--all")
    assert text.count("python -m exercises.museum") == len(NAMES)
    assert "step 0: copy_on_write 1→2 (b)" in text
    assert text.count("check_invariants: nothing") == len(NAMES) - 1


def test_every_step_whole(visit):
    assert "copy_on_write 1 copy: 1 2 (b)" in visit("3", "--trace")


def test_the_page_has_both_runs_and_names_the_step(visit, tmp_path):
    path = tmp_path / "museum.html"
    visit("5", "--explore", str(path))
    traces = re.findall(r'<script type="text/x-trace">(.*?)</script>', path.read_text("utf-8"))
    metas = [json.loads(gzip.decompress(base64.b64decode(it)).split(b"\n")[0]) for it in traces]
    assert [meta["label"] for meta in metas] == ["as it is", "with a bug"]
    assert [meta["look_at"] for meta in metas] == [None, 6]


@each
def test_the_debugger_stops_where_it_goes_wrong(name, monkeypatch, capsys):
    """The walkthrough runs its scenario anew; it fails if its stop is never reached."""
    assert main([str(NAMES.index(name) + 1), "--walkthrough"]) == 0
    assert "Stop 1 of 1" in capsys.readouterr().out
