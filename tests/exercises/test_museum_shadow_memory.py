"""Exercise: an invariant over traces that finds rows which read what is not theirs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from exercises.museum.exhibit import Arrival, Run, greedy
from exercises.museum.rooms import exhibit

from .conftest import part_of

EXERCISE = ("museum_shadow_memory.py", "misreads")
FIRST = {
    "equal_prompts": (0, "b"),
    "anothers_words": (6, "c"),
    "second_turn": (4, "one+"),
    "crafted_prompt": (1, "b"),
    "unchained": (2, "c"),
}
"""Exhibits, and where the first misread is."""
SOUND = ["equal_prompts", "anothers_words", "second_turn", "in_and_out", "free_blocks_fall"]
LOOKS_WRONG = ["shared_unwritten", "block_too_late"]
PROMPT = exhibit("equal_prompts").traffic[0].prompt
COPIED = replace(
    exhibit("equal_prompts"),
    traffic=[Arrival(0, "a", PROMPT, greedy(6)), Arrival(2, "b", PROMPT, greedy(3))],
)
"""b finds all of its prompt while a has it, and gets a copy of the last block."""


def by_tokens_alone(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return str(list(token_ids)).encode()


UNCHAINED = replace(
    exhibit("crafted_prompt"),
    broken=by_tokens_alone,
    traffic=[
        Arrival(0, "a", [11, 12, 13, 14, 15, 16, 17, 18, 19], greedy(2)),
        Arrival(1, "b", [21, 22, 23, 24, 25, 26, 27, 28, 29], greedy(2)),
        Arrival(2, "c", [21, 22, 23, 24, 15, 16, 17, 18, 19], greedy(2)),
    ],
)
"""c finds b's first block and a's second: the tokens are right, what came before them is not."""
OTHERS = {"copied": COPIED, "unchained": UNCHAINED}


@functools.cache
def run(name: str, is_changed: bool) -> Run:
    own = OTHERS.get(name) or exhibit(name)
    return own.run(is_changed)


def found_by(misreads, name: str, is_changed: bool) -> list[tuple[int, str]]:
    own = run(name, is_changed)
    known = own.known()
    return list(misreads(own.records, known, own.engine.config.block_size))


def check_broken(misreads, name: str) -> None:
    found, first = found_by(misreads, name, True), FIRST[name]
    if not found:
        pytest.fail(
            f"the engine {name!r} misreads, and nothing was found. A slot that was never "
            "written is a misread, too; so is one whose token is right and what came before is not",
            pytrace=False,
        )
    if found[0] != first:
        pytest.fail(
            f"{name}: the first that was found is {found[0]}. Mind the order in a step: copies, "
            "then the writes of all rows, then the reads of all rows",
            pytrace=False,
        )


def check_sound(misreads, name: str) -> None:
    found = found_by(misreads, name, False)
    if found:
        pytest.fail(
            f"the engine {name!r} is right, but {found[0]} was found. A row may read what "
            "another one writes in the same step, and a copied block what was copied",
            pytrace=False,
        )


def row(name: str, start: int, end: int, block: int) -> SimpleNamespace:
    """Of a trace that no exhibit makes, in blocks of four."""
    return SimpleNamespace(request_id=name, start=start, end=end, blocks=[block])


def check_half_a_copy(misreads) -> None:
    tokens = {name: [1, 2, 3, 4] for name in "abc"}
    copy = SimpleNamespace(type="copy_on_write", blocks=[1, 0])
    records = [
        _Plain(0, [], [row("a", 0, 4, 0), row("b", 0, 2, 1)]),
        _Plain(1, [copy], [row("c", 3, 4, 0)]),
    ]
    if list(misreads(records, tokens, 4)) != [(1, "c")]:
        pytest.fail(
            "block 1, of which two slots were never written, is copied to block 0, and c reads its "
            "third slot: what block 0 held before is gone",
            pytrace=False,
        )


def check_two_writers(misreads) -> None:
    records = [_Plain(0, [], [row("a", 0, 2, 0), row("b", 0, 2, 0)])]
    if len(list(misreads(records, {"a": [1, 2], "b": [3, 4]}, 4))) != 1:
        pytest.fail(
            "two rows of one step write into the same slots, and one of them reads what the other "
            "wrote: a row reads its own positions, too",
            pytrace=False,
        )


@pytest.mark.parametrize("name", FIRST)
def test_a_misread_is_found_where_it_is_first(exercise, name, figure):
    caught = [each for each in FIRST if found_by(exercise, each, True)[:1] == [FIRST[each]]]
    figure("bugs caught", f"{len(caught)} of {len(FIRST)}", "0")
    check_broken(exercise, name)


@pytest.mark.parametrize("name", [*SOUND, *LOOKS_WRONG, "copied"])
def test_a_correct_engine_misreads_nothing(exercise, name):
    check_sound(exercise, name)


@pytest.mark.parametrize("check", [check_half_a_copy, check_two_writers])
def test_what_no_exhibit_does_is_found(exercise, check):
    check(exercise)


# --- answers that look right ---------------------------------------------------------------------

SOLUTION = part_of("solution", *EXERCISE)


def without_copies(records, tokens, block_size):
    """Copies are forgotten."""
    return SOLUTION(
        [_Plain(record.step, [], record.batch) for record in records], tokens, block_size
    )


def reads_first(records, tokens, block_size):
    """All rows of a step read, then all write: what a step writes is found in the next."""
    halves = []
    for record in records:
        reading = [_Row(row, row.start) for row in record.batch]
        halves.append(_Plain(record.step, record.events, reading))
        halves.append(_Plain(record.step, [], record.batch))
    return SOLUTION(halves, tokens, block_size)


def nearly(records, tokens, block_size, is_own_read=True):
    """What a copy should overwrite is kept; maybe a row's own positions are not looked at."""
    memory, found = {}, []
    for record in records:
        for event in record.events:
            source, target = ([(block, p) for p in range(block_size)] for block in event.blocks)
            copied = {slot: memory.get(slot) for slot in source}
            memory |= {t: copied[s] for s, t in zip(source, target, strict=True) if copied[s]}
        slots = {
            row.request_id: [(row.blocks[p // block_size], p % block_size) for p in range(row.end)]
            for row in record.batch
        }
        for row in record.batch:
            own = tokens[row.request_id]
            memory |= {slots[row.request_id][p]: own[: p + 1] for p in range(row.start, row.end)}
        for row in record.batch:
            end = row.end if is_own_read else row.start
            held = [memory.get(slot) for slot in slots[row.request_id][:end]]
            if held != [tokens[row.request_id][: p + 1] for p in range(end)]:
                found.append((record.step, row.request_id))
    return found


def tokens_alone(records, tokens, block_size):
    """A slot holds a token, whatever came before it."""
    memory, found = {}, []
    for record in records:
        for row in record.batch:
            for p in range(row.start, row.end):
                memory[row.blocks[p // block_size], p % block_size] = tokens[row.request_id][p]
        for row in record.batch:
            slots = [(row.blocks[p // block_size], p % block_size) for p in range(row.end)]
            if [memory.get(slot) for slot in slots] != list(tokens[row.request_id][: row.end]):
                found.append((record.step, row.request_id))
    return found


class _Plain:
    def __init__(self, step, events, batch):
        self.step, self.events, self.batch = step, events, batch


class _Row:
    """A row that computes nothing, and reads what was there before it."""

    def __init__(self, row, end):
        self.request_id, self.blocks, self.start, self.end = row.request_id, row.blocks, end, end


def test_who_forgets_copies_is_caught():
    with pytest.raises(pytest.fail.Exception, match="a copied block"):
        check_sound(without_copies, "copied")


def test_who_compares_tokens_alone_is_caught():
    with pytest.raises(pytest.fail.Exception, match="what came before is not"):
        check_broken(tokens_alone, "unchained")


def test_who_reads_before_the_step_writes_is_caught():
    with pytest.raises(pytest.fail.Exception, match="in the same step"):
        check_sound(reads_first, "shared_unwritten")


def test_who_keeps_what_a_copy_overwrites_is_caught():
    with pytest.raises(pytest.fail.Exception, match="what block 0 held before is gone"):
        check_half_a_copy(nearly)


def test_who_does_not_look_at_a_rows_own_positions_is_caught():
    check_two_writers(nearly)
    with pytest.raises(pytest.fail.Exception, match="its own positions, too"):
        check_two_writers(functools.partial(nearly, is_own_read=False))
