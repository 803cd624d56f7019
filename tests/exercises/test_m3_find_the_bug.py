"""Checks exercises/m3_find_the_bug.py. It says where to look again, and not what is there."""

import functools
import importlib.util
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

EXERCISE = ("m3_find_the_bug.py", "finding")
BLOCK_SIZE = 4

spec = importlib.util.spec_from_file_location(
    "m3_find_the_bug_engine", Path(__file__).parents[2] / "exercises/m3_find_the_bug_engine.py"
)
engine_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine_module)


@functools.cache
def records():
    """The trace of the changed engine."""
    return engine_module.serve(is_changed=True, trace="memory")[0].tracer.records


def writers(record):
    """Who writes to which slot in a step: request and position, by block and offset."""
    places = defaultdict(list)
    for row in record.batch:
        for position in range(row.start, row.start + row.num_new_tokens):
            place = row.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            places[place].append((row.request_id, position))
    return places


@functools.cache
def truth():
    """The first step in which two rows write to one slot."""
    for record in records():
        for (block, _), who in writers(record).items():
            if len(who) > 1:
                names = {name for name, _ in who}
                return SimpleNamespace(
                    step=record.step, requests=names, block=block, position=who[0][1], cause="a"
                )
    raise AssertionError("the changed engine does no damage")


def require(is_right, hint):
    """Fail with a hint and nothing else: pytest shows both sides of an `assert`, the answer too."""
    if not is_right:
        pytest.fail(hint, pytrace=False)


def check_step(found):
    right = truth().step
    require(found.step >= 0, f"there is no step {found.step}")
    require(found.step < len(records()), f"the trace has no step {found.step}")
    require(
        found.step <= right,
        f"in step {found.step} the damage may show, but it was done before. Look at the steps in "
        "which two completions of one prompt still have the same last block.",
    )
    require(
        found.step == right,
        f"in step {found.step} no two rows write to the same slot. Sharing a block is no damage: "
        "two requests may read it. Go on to the next step in which one of them writes there.",
    )


def check_requests(found):
    require(
        found.requests == truth().requests,
        f"when the damage is done it is not {sorted(found.requests)} that write to one slot. "
        "Compute block and offset of every row's new token: blocks[p // 4] and p % 4.",
    )


def check_place(found):
    require(
        found.block == truth().block,
        f"block {found.block} is not where both write. Their new token has position p; the block "
        "is entry p // 4 of their tables.",
    )
    require(
        found.position == truth().position,
        f"position {found.position} is not what the two compute when the damage is done: it is "
        "`start` of their rows",
    )


WHY_NOT = {
    "b": "No `alloc` event of a block that a request still has is in the trace. Both requests have "
    "the block in their tables since the `share` event, and rightly so.",
    "c": "Every table in the trace has as many blocks as its request needs: position p needs "
    "p // 4 + 1 of them.",
    "d": "`preempted` is empty in every step of the trace.",
    "e": "Every row starts where the row of the same request ended in the step before.",
}


def check_cause(found):
    require(found.cause in list("abcde"), f"{found.cause!r} is no letter of CAUSES")
    require(found.cause == truth().cause, WHY_NOT.get(found.cause, ""))


CHECKS = (check_step, check_requests, check_place, check_cause)


def num_right(found):
    count = 0
    for check in CHECKS:
        try:
            check(found)
        except pytest.fail.Exception:
            continue
        count += 1
    return count


def check_all(found):
    for check in CHECKS:
        check(found)


@pytest.mark.parametrize("check", CHECKS)
def test_finding(exercise, check, figure):
    found = exercise()
    figure("questions answered", f"{num_right(found)} of {len(CHECKS)}", "0")
    check(found)


def test_the_engine_is_wrong_and_the_trace_shows_it():
    right = engine_module.serve(is_changed=False, trace="memory")
    wrong = engine_module.serve(is_changed=True, trace="memory")
    assert right[1] != wrong[1], "a user has no reason to complain"
    for record in right[0].tracer.records:
        assert all(len(who) == 1 for who in writers(record).values())


def test_the_script_leaves_a_trace_and_a_page(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    engine_module.main()
    assert "is the first wrong one" in capsys.readouterr().out
    assert (tmp_path / "runs" / "find_the_bug.jsonl").stat().st_size > 0
    assert "<html" in (tmp_path / "runs" / "find_the_bug.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 8}, "the damage may show, but it was done before"),
        ({"step": 2}, "no two rows write to the same slot"),
        ({"step": 99}, "the trace has no step 99"),
        ({"requests": {"r1", "r1/1"}}, "Compute block and offset"),
        ({"block": 9}, "block 9 is not where both write"),
        ({"position": 12}, "position 12 is not what the two compute"),
        ({"cause": "b"}, "since the `share` event"),
        ({"cause": "d"}, "`preempted` is empty"),
        ({"cause": "z"}, "is no letter of CAUSES"),
    ],
)
def test_a_wrong_answer_is_told_where_to_look(change, words):
    found = SimpleNamespace(**{**vars(truth()), **change})
    assert num_right(found) == len(CHECKS) - 1
    with pytest.raises(pytest.fail.Exception, match=words) as failure:
        check_all(found)
    assert not failure.value.pytrace
    values = [*truth().requests, *map(str, (truth().step, truth().block, truth().position))]
    told = re.findall(r"[\w/]+", str(failure.value))
    assert not set(values) & set(told), f"this gives the answer away: {failure.value}"


def test_what_is_said_of_the_other_causes_is_true():
    ends, held = {}, defaultdict(set)
    for record in records():
        assert not record.preempted
        for event in record.events:
            if event.type == "alloc":
                others = set().union(*(held[name] for name in held if name != event.request_id))
                assert not others & set(event.blocks)
            if event.type == "free":
                held.pop(event.request_id, None)
        for row in record.batch:
            held[row.request_id] = set(row.blocks)
            assert row.start == ends.get(row.request_id, row.start)
            ends[row.request_id] = row.start + row.num_new_tokens
            assert len(row.blocks) >= -(-ends[row.request_id] // BLOCK_SIZE)
