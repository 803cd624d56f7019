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
from dataclasses import replace
from unittest import mock

import pytest

from exercises.museum import invariants, show
from exercises.museum.__main__ import main
from exercises.museum.exhibit import Exhibit, Run
from exercises.museum.lines import lines, without_numbers
from exercises.museum.rooms import NAMES, exhibit
from m3_paged import scheduler as m3_scheduler
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.prefix_cache import PrefixCache
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.frontend.detokenizer import Detokenizer

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
    "another_rows_rule": {"animal", "free"},
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

    assert [first_step("waits_for_nothing", changed, "b") for changed in (False, True)] == [2, 5]
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
    others = [text for texts in lines(other)[int(step) :][:1] for text in texts]
    assert (line in others) == is_outside
    assert own.is_false_alarm or list(own.invariant(other)) == []


def test_the_engines_own_check_catches_lost_blocks_and_nothing_else():
    assert {name for name in NAMES if run(name, True).check} == {"free_blocks_fall"}
    assert run("free_blocks_fall", True).check == "step 1: block 1: 0 tables, count 1"
    assert "the plan is empty" in run("free_blocks_fall", True).raised


# --- the test that would have caught it ----------------------------------------------------------

TOO_SLOW = {"free_blocks_fall", "recycled_row", "seam"}
"""Random runs, and an engine with its steps under way: what they say was seen once."""
NEEDS_A_SLOW_DEVICE = {"next_steps_rows"}
"""Its test is below."""


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


@each
def test_the_named_test_fails_with_this_bug(name):
    own = exhibit(name)
    path, _, test = own.card["test"].partition("::")
    assert f"def {test}(" in (ROOT / path).read_text("utf-8")
    if name in TOO_SLOW | NEEDS_A_SLOW_DEVICE:
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


def test_a_device_that_is_behind_computes_with_what_was_sent_for_the_step():
    """With a short prompt beside it, no step is long, and one buffer is enough."""
    own = exhibit("next_steps_rows")
    short = [
        replace(each, prompt=each.prompt[:10]) if each.name == "long" else each
        for each in own.traffic
    ]
    assert len(short[2].prompt) == 10
    assert (
        replace(own, traffic=short).run(is_changed=True).tokens["b"]
        == alone("next_steps_rows").tokens["b"]
    )
    assert wrong("next_steps_rows", True) == {"b"}
    assert wrong("next_steps_rows", False) == set()


# --- other explanations --------------------------------------------------------------------------


class ChargesPrompts(m3_scheduler.Scheduler):
    """The budget pays for the prompts of all who run, in every step."""

    def reason_to_wait(self, request, budget):
        charged = sum(running.num_prompt_tokens for running in self.running)
        return super().reason_to_wait(request, self.config.max_num_batched_tokens - charged)


class SearchesNewText(Detokenizer):
    """A stop string is found within one token."""

    def _cut_at_stop(self, known):
        new = known[len(self._settled) :]
        return any(stop in new for stop in self.stop) and super()._cut_at_stop(known)


class LeavesNames(CachingBlockPool):
    """A block that is to be forgotten keeps its name."""

    def forget(self, block):
        self.num_cached_free -= self.ref_counts[block] == 0


class IgnoresEnd(PrefixCache):
    """All known tokens count as computed."""

    def make_findable(self, request, end):
        super().make_findable(request, len(request.token_ids))


class CutsRows(Scheduler):
    """A row is made for all that is left of a prompt, and cut to the budget."""

    def _add_row(self, request, plan, budget, num_cached=0):
        super()._add_row(request, plan, 10**9, num_cached)
        row = plan.rows[-1]
        row.num_new_tokens = min(row.num_new_tokens, budget)
        return row.num_new_tokens


@pytest.mark.parametrize(
    ("name", "place", "other", "is_told_apart"),
    [
        ("waits_for_nothing", "m3_paged.engine.Scheduler", ChargesPrompts, True),
        (
            "runs_past_stop",
            "milestone_llm.frontend.output_processor.Detokenizer",
            SearchesNewText,
            True,
        ),
        ("anothers_words", "m4_prefix_chunked.scheduler.CachingBlockPool", LeavesNames, False),
        ("second_turn", "m4_prefix_chunked.scheduler.PrefixCache", IgnoresEnd, False),
        ("tokens_too_many", "m4_prefix_chunked.engine.Scheduler", CutsRows, False),
    ],
)
def test_the_traffic_tells_causes_apart_or_the_card_takes_both(name, place, other, is_told_apart):
    own = exhibit(name)
    rival = replace(own, place=place, broken=other).run(is_changed=True)
    assert lines(rival) != lines(run(name, False))
    assert (lines(rival) != lines(run(name, True))) == is_told_apart
    assert ("counts" in own.card["cause"]) != is_told_apart


# --- what an exhibit is --------------------------------------------------------------------------


@each
def test_an_exhibit_has_one_method_that_is_not_ours(name):
    own = exhibit(name)
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
    assert "The card ──" in text
    assert own.card["question"][:20] not in text, "the exhibit is not shown again"
    assert own.card["cause"][:30] in text
    assert own.card["test"] in text  # whole, so that it can be copied


def test_enter_shows_the_card_to_who_sits_at_a_terminal(visit, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda *prompt: "")
    assert "The card ──" in visit("3")


def test_all_exhibits_in_one_list(visit):
    text = visit("--all")
    assert text.count("python -m exercises.museum") == len(NAMES)
    assert "step 0: copy_on_write 1→2 (b)" in text
    assert text.count("check_invariants: nothing") == len(NAMES) - 1


def test_every_step_whole_and_of_which_engine(visit):
    assert "copy_on_write 1 copy: 1 2 (b)" in visit("3", "--trace")
    assert "have room for: suspect ──" in visit("2", "--trace")
    text = visit("1", "--trace")
    assert ": suspect ──" in text
    assert "PlanError: there are requests, but the plan is empty" in text


def test_the_head_says_what_is_not_usual_and_the_end_what_was_tried(visit):
    text = visit("10")
    assert "enable_prefix_caching=False" in text
    assert "positions computed for b: 31 (correct), 75 (suspect)" in text
    assert "suspect: as wrong with one request at a time, or with a larger budget" in text
    assert "a device that falls behind" in visit("13")


def test_a_star_is_for_what_differs_and_not_for_block_ids(visit):
    text = visit("9")
    assert "* b 0..11 → 131 [7-9]" in text
    assert not re.search(r"\* (a|z|alloc \d+ \(a\)) ", text)
    assert "\n          this step: 7\n" in text  # a long line goes on below, indented
    assert without_numbers("free 0-4 9 (a)") == without_numbers("free 1 2 6-9 (a)")
    assert without_numbers("a 3 → 176 [0]") != without_numbers("a 3 → 176 [0 1]")
    assert without_numbers("waits b: blocks needed 8, free 6") == "waits b: blocks needed 8, free 6"


def test_a_row_has_all_its_tokens_and_says_where_it_stops_short(visit):
    assert "a 5..6 → 107 63, 1 of 3 guesses" in visit("17")
    assert "* long 0..8 of 18 → 138 [1-5]" in visit("11")
    assert "* b 0..9 of 11 → 156" in visit("12")


def test_the_page_has_both_runs_and_names_the_step(visit, tmp_path):
    path = tmp_path / "museum.html"
    visit("5", "--explore", str(path))
    traces = re.findall(r'<script type="text/x-trace">(.*?)</script>', path.read_text("utf-8"))
    metas = [json.loads(gzip.decompress(base64.b64decode(it)).split(b"\n")[0]) for it in traces]
    assert [meta["label"] for meta in metas] == ["correct", "suspect"]
    assert [meta["look_at"] for meta in metas] == [None, 5]


@each
def test_the_debugger_stops_where_it_goes_wrong(name, monkeypatch, capsys):
    """The walkthrough runs its scenario anew; it fails if its stop is never reached."""
    assert main([str(NAMES.index(name) + 1), "--walkthrough"]) == 0
    assert "Stop 1 of 1" in capsys.readouterr().out
