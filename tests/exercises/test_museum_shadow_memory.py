"""Checks exercises/museum_shadow_memory.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from exercises.museum.exhibit import Arrival, Run, greedy
from exercises.museum.rooms import exhibit

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


def by_tokens_alone(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return str(list(token_ids)).encode()


PROMPT = exhibit("equal_prompts").traffic[0].prompt
OTHERS = {
    # b finds all of its prompt while a has it, and gets a copy of the last block.
    "copied": replace(
        exhibit("equal_prompts"),
        traffic=[Arrival(0, "a", PROMPT, greedy(6)), Arrival(2, "b", PROMPT, greedy(3))],
    ),
    # c finds b's first block and a's second: the tokens are right, what came before is not.
    "unchained": replace(
        exhibit("crafted_prompt"),
        broken=by_tokens_alone,
        traffic=[
            Arrival(0, "a", [11, 12, 13, 14, 15, 16, 17, 18, 19], greedy(2)),
            Arrival(1, "b", [21, 22, 23, 24, 25, 26, 27, 28, 29], greedy(2)),
            Arrival(2, "c", [21, 22, 23, 24, 15, 16, 17, 18, 19], greedy(2)),
        ],
    ),
}


@functools.cache
def run(name: str, is_changed: bool) -> Run:
    return (OTHERS.get(name) or exhibit(name)).run(is_changed)


def found_by(misreads, name: str, is_changed: bool) -> list[tuple[int, str]]:
    own = run(name, is_changed)
    return list(misreads(own.records, own.known(), own.engine.config.block_size))


def step(number: int, events: list[object], *rows: tuple[str, int, int, int]) -> SimpleNamespace:
    """Of a trace that no exhibit makes: of each row the request, start, end and its only block."""
    batch = [SimpleNamespace(request_id=n, start=s, end=e, blocks=[b]) for n, s, e, b in rows]
    return SimpleNamespace(step=number, events=events, batch=batch)


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


WRONG, TOLD = tokens_alone, "what came before is not"


@pytest.mark.parametrize("name", FIRST)
def test_a_misread_is_found_where_it_is_first(exercise, name, figure):
    caught = [each for each in FIRST if found_by(exercise, each, True)[:1] == [FIRST[each]]]
    figure("bugs caught", f"{len(caught)} of {len(FIRST)}", "0")
    found = found_by(exercise, name, True)
    assert found, (
        f"the engine {name!r} misreads, and nothing was found. A slot that was never "
        "written is a misread, too; so is one whose token is right and what came before is not"
    )
    assert found[0] == FIRST[name], (
        f"{name}: the first that was found is {found[0]}. Mind the order in a step: copies, "
        "then the writes of all rows, then the reads of all rows"
    )


@pytest.mark.parametrize("name", [*SOUND, *LOOKS_WRONG, "copied"])
def test_a_correct_engine_misreads_nothing(exercise, name):
    found = found_by(exercise, name, False)
    assert not found, (
        f"the engine {name!r} is right, but {found[0]} was found. A row may read what "
        "another one writes in the same step, and a copied block what was copied"
    )


def test_a_block_is_copied_whole(exercise):
    tokens = {name: [1, 2, 3, 4] for name in "abc"}
    copy = SimpleNamespace(type="copy_on_write", blocks=[1, 0])
    records = [step(0, [], ("a", 0, 4, 0), ("b", 0, 2, 1)), step(1, [copy], ("c", 3, 4, 0))]
    assert list(exercise(records, tokens, 4)) == [(1, "c")], (
        "block 1, of which two slots were never written, is copied to block 0, and c reads its "
        "third slot: what block 0 held before is gone"
    )


def test_a_row_reads_its_own_positions_too(exercise):
    records = [step(0, [], ("a", 0, 2, 0), ("b", 0, 2, 0))]
    assert len(list(exercise(records, {"a": [1, 2], "b": [3, 4]}, 4))) == 1, (
        "two rows of one step write into the same slots, and one of them reads what the other "
        "wrote: a row reads its own positions, too"
    )
