"""Exercise: find three bugs of the museum, each from a trace alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from exercises.museum_three_traces_engine import engines, main

from .conftest import part_of

EXERCISE = ("museum_three_traces.py", "findings")
CAUSES = part_of("yours", "museum_three_traces.py", "CAUSES")


@functools.cache
def trace(letter: str):
    return engines()[letter].suspect()


def truth(letter: str):
    """Step and cause as the invariant and the exhibit have them."""
    step, _ = next(engines()[letter].invariant(trace(letter)))
    (wrong,) = wrong_requests(letter)
    return step, wrong, {"A": "b", "B": "e", "C": "a"}[letter]


def wrong_requests(letter: str) -> list[str]:
    right = alone(letter)
    return [name for name, tokens in right.items() if trace(letter).tokens[name] != tokens]


@functools.cache
def alone(letter: str) -> dict[str, list[int]]:
    return engines()[letter].alone().tokens


def require(is_right: bool, text: str) -> None:
    if not is_right:
        pytest.fail(text, pytrace=False)


def check(letter: str, found) -> None:
    """Judge one finding; say what to look at, and not the answer."""
    step, request, cause = truth(letter)
    records = {record.step: record for record in trace(letter).records}
    require(found.step in records, f"{letter}: the trace has no step {found.step}")
    require(
        found.step >= step,
        f"{letter}: what step {found.step} says of requests a correct engine may say. Go on.",
    )
    require(
        found.step == step,
        f"{letter}: in step {found.step} something may be wrong, but not first. Go back.",
    )
    require(
        found.request == request,
        f"{letter}: it is not {found.request} of whom step {found.step} tells what cannot be",
    )
    require(found.cause in CAUSES, f"{letter}: {found.cause!r} is no letter of CAUSES")
    require(found.cause == cause, f"{letter}: {WHY_NOT[found.cause]}")


WHY_NOT = {
    "a": "whoever took blocks after their owner had ended took other ones than these",
    "b": "follow its owner's rows: each slot of the blocks was written",
    "c": "there is no copy_on_write in this trace",
    "d": "every row has a position",
    "e": "every row that sampled ended with the last token that was known",
    "f": "no block stands in two tables at a place where one of them writes",
    "g": "nobody is preempted in this trace",
}


@pytest.mark.parametrize("letter", "ABC")
def test_findings(exercise, letter, figure):
    found = exercise()
    require(set(found) == set("ABC"), "findings() is a dict with A, B and C")
    figure("traces read", f"{sum(map(is_right, 'ABC', found.values()))} of 3", "0")
    check(letter, found[letter])


def is_right(letter: str, found) -> bool:
    return (found.step, found.request, found.cause) == truth(letter)


@pytest.mark.parametrize("letter", "ABC")
def test_one_answer_is_wrong_and_nothing_else_gives_it_away(letter):
    own, run = engines()[letter], trace(letter)
    assert len(wrong_requests(letter)) == 1
    assert (run.check, run.raised) == ("", "")
    assert not any(record.preempted for record in run.records)
    events = [event.type for record in run.records for event in record.events]
    assert "copy_on_write" not in events
    assert list(own.invariant(own.run(is_changed=False))) == []


@pytest.mark.parametrize(
    ("letter", "change", "words"),
    [
        ("A", {"step": 7, "request": "ann2"}, "Go on"),
        ("A", {"step": 9}, "Go back"),
        ("A", {"cause": "a"}, "other ones than these"),
        ("B", {"request": "ann"}, "it is not ann"),
        ("B", {"cause": "g"}, "nobody is preempted"),
        ("C", {"step": 6, "request": "dan"}, "Go on"),
        ("C", {"cause": "b"}, "each slot of the blocks was written"),
        ("C", {"cause": "z"}, "no letter"),
        ("C", {"step": 99}, "no step 99"),
    ],
)
def test_a_wrong_answer_is_told_where_to_look(letter, change, words):
    step, request, cause = truth(letter)
    found = {"step": step, "request": request, "cause": cause, **change}
    with pytest.raises(pytest.fail.Exception, match=words) as failure:
        check(letter, SimpleNamespace(**found))
    assert str(step) not in str(failure.value).split() or found["step"] == step


def test_the_script_prints_three_traces(capsys):
    main()
    text = capsys.readouterr().out
    assert [text.count(f"--- {letter} ---") for letter in "ABC"] == [1, 1, 1]
