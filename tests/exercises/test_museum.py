"""The museum of bugs: each broken engine shows its symptom, the healthy one does not, and the named
invariant catches it.
"""

from __future__ import annotations

import base64
import functools
import gzip
import inspect
import json
import re
import sys
from dataclasses import replace

import pytest

from exercises.museum import invariants, show
from exercises.museum.__main__ import main
from exercises.museum.exhibit import Exhibit, Run
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
    "another_rows_rule": {"animal", "free"},
    "neighbours_expert": {"b", "c", "d"},
    "withdrawn_row": {"a"},
    "given_away": {"a", "b"},
    "planned_too_long": {"b"},
    "one_token_early": {"long"},
}
"""Whose tokens are not those of the correct engine; in the other exhibits nobody's."""
INVARIANTS = [
    each
    for each in vars(invariants).values()
    if inspect.isfunction(each) and each.__module__ == invariants.__name__
]

each = pytest.mark.parametrize("name", NAMES)


@functools.cache
def run(name: str, is_changed: bool) -> Run:
    """A run of an exhibit, made once for all tests."""
    return exhibit(name).run(is_changed)


@each
def test_no_invariant_says_anything_of_the_correct_engine(name):
    healthy = run(name, False)
    assert (healthy.check, healthy.raised) == ("", "")
    for invariant in INVARIANTS:
        assert list(invariant(healthy)) == [], invariant.__name__


@each
def test_the_broken_engine_is_wrong_where_the_exhibit_says(name):
    right, tokens = run(name, False).tokens, run(name, True).tokens
    assert {who for who in right if tokens.get(who) != right[who]} == WRONG.get(name, set())


def test_what_is_wrong_where_all_tokens_are_right():
    """Somebody waits for nothing, or computes in vain, or again; a block too early is only a
    waste."""

    def first_step(name, is_changed, who):
        records = run(name, is_changed).records
        return next(r.step for r in records if any(row.request_id == who for row in r.batch))

    def num_allocated(run: Run) -> int:
        events = (event for record in run.records for event in record.events)
        return sum(len(event.blocks) for event in events if event.type == "alloc")

    assert [first_step("waits_for_nothing", changed, "b") for changed in (False, True)] == [2, 5]
    for is_changed, num_preemptions in ((False, 0), (True, 4)):
        records = run("in_and_out", is_changed).records
        assert sum(len(record.preempted) for record in records) == num_preemptions
    for is_changed, start in ((False, 8), (True, 0)):
        rows = [
            row for record in run("beginnings_go_first", is_changed).records for row in record.batch
        ]
        assert next(row.start for row in rows if row.request_id == "a again") == start
    for name in ALARMS:
        assert num_allocated(run(name, True)) > num_allocated(run(name, False))


@each
def test_the_invariant_finds_what_is_wrong(name):
    own = exhibit(name)
    assert own.is_false_alarm == (name in ALARMS)
    assert list(own.invariant(run(name, not own.is_false_alarm)))
    assert own.is_false_alarm or list(own.invariant(run(name, False))) == []


def test_the_engines_own_checks_catch_wrong_books_and_plans_and_nothing_else():
    checked = {name for name in NAMES if run(name, True).check}
    assert checked == {"free_blocks_fall", "given_away"}
    assert "b's row has 13 tokens" in run("planned_too_long", True).raised
    assert "the plan is empty" in run("free_blocks_fall", True).raised


def test_a_device_that_is_behind_computes_with_what_was_sent_for_the_step():
    """With a short prompt beside it, no step is long, and one buffer is enough."""
    own = exhibit("next_steps_rows")
    short = [
        replace(each, prompt=each.prompt[:10]) if each.name == "long" else each
        for each in own.traffic
    ]
    assert len(short[2].prompt) == 10
    tokens = replace(own, traffic=short).run(is_changed=True).tokens
    assert tokens["b"] == run("next_steps_rows", False).tokens["b"]


@each
def test_an_exhibit_has_a_card(name):
    own = exhibit(name)
    words = ["question", "cause", "invariant", "fix", "test", "seen", "threads"]
    assert list(own.card) == words
    path, _, test = own.card["test"].partition("::")
    assert f"def {test}(" in (ROOT / path).read_text("utf-8")
    for thread in own.card["threads"].split(", "):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+ \((merged|closed|open)\)", thread)


def test_numbers_that_are_named_elsewhere():
    numbers = {name: number for number, name in enumerate(NAMES, 1)}
    assert (numbers["equal_prompts"], numbers["shared_unwritten"]) == (3, 8)  # cards name them
    assert numbers["next_steps_rows"] == 13  # an exercise does


# --- a visit -------------------------------------------------------------------------------------


@pytest.fixture
def visit(monkeypatch, capsys):
    """The program, with the runs that the tests have made."""
    names = {id(exhibit(name)): name for name in NAMES}
    runs = {(name, changed): run(name, changed) for name in NAMES for changed in (False, True)}
    monkeypatch.setattr(
        Exhibit, "run", lambda own, is_changed, **_: runs[names[id(own)], is_changed]
    )

    def call(*arguments: str) -> str:
        capsys.readouterr()
        assert main(arguments) == 0
        return capsys.readouterr().out

    return call


def test_the_rooms_and_all_exhibits_in_one_list(visit):
    text = visit()
    assert all(show.SYMPTOMS[name] in text for name in NAMES)
    with pytest.raises(SystemExit):
        main([str(len(NAMES) + 1)])
    text = visit("--all")
    assert text.count("python -m exercises.museum") == len(NAMES)
    assert "step 0: block 1 is copied before it is written" in text


def test_a_visit_shows_traffic_trace_and_outcome(visit):
    text = visit("10")
    assert "enable_prefix_caching=False" in text
    assert "preempted b: no free block for b" in text
    assert "75 positions are computed for b, not 31" in text
    assert "suspect: as wrong with one request at a time, or with a larger budget" in text
    assert "suspect: b gets 12 88 159 169; it should get 118 55 30 159" in visit("3")
    assert "PlanError: there are requests, but the plan is empty" in visit("1")
    assert "a device that falls behind" in " ".join(visit("13").split())


@each
def test_the_card_comes_after_the_question_and_when_asked_for(name, visit):
    number, own = str(NAMES.index(name) + 1), exhibit(name)
    text = visit(number)
    assert " ".join(own.card["question"].split()) in " ".join(text.split())
    for secret in (own.card["cause"], own.card["fix"]):
        assert secret[:30] not in text
    text = visit(number, "--card")
    assert own.card["question"][:20] not in text, "the exhibit is not shown again"
    assert own.card["cause"][:30] in text
    assert own.card["test"] in text  # whole, so that it can be copied


def test_enter_shows_the_card_to_who_sits_at_a_terminal(visit, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda *prompt: "")
    assert "The card ──" in visit("3")


def test_the_page_has_both_runs_and_names_the_step(visit, tmp_path):
    path = tmp_path / "museum.html"
    visit("5", "--explore", str(path))
    traces = re.findall(r'<script type="text/x-trace">(.*?)</script>', path.read_text("utf-8"))
    metas = [json.loads(gzip.decompress(base64.b64decode(it)).split(b"\n")[0]) for it in traces]
    assert [meta["label"] for meta in metas] == ["correct", "suspect"]
    assert [meta["look_at"] for meta in metas] == [None, 5]


@each
def test_the_debugger_stops_where_it_goes_wrong(name, capsys):
    """The walkthrough runs its scenario anew; it fails if its stop is never reached."""
    assert main([str(NAMES.index(name) + 1), "--walkthrough"]) == 0
    assert "Stop 1 of 1" in capsys.readouterr().out
