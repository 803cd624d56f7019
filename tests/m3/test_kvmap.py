"""Block history, its map in the terminal, and the picture: read from traces of real engines."""

from __future__ import annotations

import functools
import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import m1_single
import m2_batching
import m3_paged
from m1_single import SamplingParams
from m3_paged.tools.demo_maps import print_block_map
from milestone_llm.core.errors import InputError
from milestone_llm.lab.plots.block_history import BlockState, block_history
from milestone_llm.lab.plots.kvmap import draw_kvmap
from milestone_llm.lab.trace.kv_figures import kv_figures
from milestone_llm.trace.records import StepRecord

PNG = b"\x89PNG\r\n\x1a\n"
ORDER = [f"r{number}" for number in range(20)]


@functools.cache
def engine_after_run(package: Any, n: int = 1, **fields: Any) -> Any:
    """An engine that has served four requests of 20 tokens in and 12..30 out."""
    engine = package.LLMEngine(
        "tiny-llama", device="cpu", max_model_len=64, trace="memory", max_num_seqs=12, **fields
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 199) for _ in range(18)] for _ in range(4)]
    params = [
        SamplingParams(temperature=1, seed=7, max_tokens=length, ignore_eos=True, n=n)
        for length in (12, 30, 18, 24)
    ]
    engine.generate(prompts, params)
    return engine


def trace(package: Any = m3_paged, **fields: Any) -> list[StepRecord]:
    return list(engine_after_run(package, **fields).tracer.records)


def storm() -> list[StepRecord]:
    """Memory for about half of the requests."""
    return trace(block_size=8, kv_cache_tokens=96)


def forks() -> list[StepRecord]:
    """Three completions of each prompt, whose last block is not full."""
    return trace(n=3, block_size=8, kv_cache_tokens=320)


# --- block history --------------------------------------------------------------------------


def test_history_agrees_with_the_pool() -> None:
    for records in (storm(), forks()):
        for state, record in zip(block_history(records), records, strict=True):
            assert (state.num_blocks, state.block_size) == (record.kv.total, 8)
            if not record.finished:  # the record's numbers are those after the step
                forked = any(event.type == "share" for event in record.events)
                assert len(state.holders) == record.kv.used
                assert forked or state.num_stored_tokens == record.kv.stored_tokens
                assert state.num_reserved_tokens == record.kv.reserved_tokens


def test_history_names_all_holders_of_a_shared_block() -> None:
    shared = [state.shared for state in block_history(forks())]
    assert shared[0] == {}
    assert ["r0", "r0/1", "r0/2"] in shared[1].values()


def test_a_region_is_one_block_of_max_model_len() -> None:
    states = list(block_history(trace(m2_batching)))
    assert (states[0].num_blocks, states[0].block_size) == (12, 64)
    assert states[0].stored == {0: 18, 1: 18, 2: 18, 3: 18}


def test_a_request_that_got_no_row_keeps_its_blocks() -> None:
    records = storm()[:2]
    lost, *others = records[1].batch
    states = list(block_history([records[0], replace(records[1], batch=others)]))
    assert [lost.request_id] in states[1].holders.values()


def test_figures_of_a_run() -> None:
    figures = kv_figures(
        engine_after_run(m3_paged, block_size=8, kv_cache_tokens=96).tracer.records
    )
    engine = engine_after_run(m3_paged, block_size=8, kv_cache_tokens=96)
    assert (
        figures["num_preemptions"]
        == figures["num_resumptions"]
        == engine.stats()["preemptions"]
        > 0
    )
    assert figures["num_recomputed_tokens"] > 0 == figures["num_swapped_blocks"]
    assert (figures["total"], figures["max_concurrent"]) == (12, 4)
    assert 0 < figures["waste_per_request"] <= 8 / 2 + 1
    regions = kv_figures(engine_after_run(m2_batching).tracer.records)
    assert regions["waste_per_request"] > 5 * figures["waste_per_request"]
    assert regions["waste_share"] > 0.5


# --- the map in the terminal ----------------------------------------------------------------


def block_map(state: BlockState, order: list[str], width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_block_map(state, order, Console(file=file, width=width, color_system=None))
    file.flush()
    return raw.getvalue().decode(encoding)


def made_up_state(num_blocks: int, num_requests: int) -> BlockState:
    """Requests own neighbouring blocks, the last of them half full; every fifth block is free."""
    state = BlockState(0, num_blocks, 16)
    for block in range(num_blocks):
        if block % 5:
            number = block * num_requests // num_blocks
            is_last = (block + 1) * num_requests // num_blocks > number
            state.holders[block], state.stored[block] = [f"r{number}"], 8 if is_last else 16
    return state


def test_the_map_shows_owner_and_fill_of_each_block_and_only_a_full_one_looks_full() -> None:
    holders = {0: ["r0"], 1: ["r0", "r0/1"], 4: ["r1"]}
    state = BlockState(3, 5, 16, holders, {0: 16, 1: 15, 4: 1})
    lines = block_map(state, ["r0", "r1", "r0/1"]).splitlines()
    assert lines[0] == "blocks   3 of 5 used, 2 free, 1 shared; 32 tokens in 48 places"
    assert lines[1].split() == ["0", "r0", "████", "r0+1", "███░", "-", "-"]
    assert lines[2].split() == ["4", "r1", "█░░░"]


def test_of_a_large_pool_the_first_blocks_are_shown_and_the_rest_is_summed_up() -> None:
    lines = block_map(made_up_state(1000, 20), ORDER).splitlines()
    assert len(lines) == 1 + 16 + 1
    assert lines[-1] == "… 936 more blocks, 749 used"


@pytest.mark.parametrize("num_blocks", [1, 13, 20_000])
@pytest.mark.parametrize("width", [40, 200])
def test_map_fits_the_width(num_blocks: int, width: int) -> None:
    text = block_map(made_up_state(num_blocks, 7), ORDER, width)
    assert max(map(len, text.splitlines())) <= width


def test_map_is_ascii_where_the_encoding_knows_no_more() -> None:
    state = BlockState(0, 2, 4, {0: ["消息"]}, {0: 3})
    assert "消息 ███░  -" in block_map(state, ["消息"])
    assert "?? ###.  -" in block_map(state, ["消息"], encoding="ascii")


# --- the picture ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "suffix"),
    [
        (storm, ".png"),
        (forks, ".svg"),
        (lambda: trace(m2_batching), ".png"),
    ],
)
def test_every_kind_of_trace_gives_a_picture(make: Any, suffix: str, tmp_path: Path) -> None:
    path = draw_kvmap(make(), tmp_path / "deep" / f"map{suffix}")
    assert path.read_bytes().startswith(PNG if suffix == ".png" else b"<?xml")


def test_picture_names_requests_and_what_happened(tmp_path: Path) -> None:
    text = draw_kvmap(storm(), tmp_path / "map.svg").read_text()
    for words in ("r0", "r3", "reserved, empty", "free", "preempted", "resumed"):
        assert f"<!-- {words} -->" in text, words
    assert "12 blocks of 8 tokens" in text
    text = draw_kvmap(forks(), tmp_path / "map.svg").read_text()
    for words in ("r0", "r0/2", "copy-on-write"):
        assert f"<!-- {words} -->" in text, words


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (storm, "map.gif", "a map is written as .png or .svg"),
        (lambda: trace(m1_single), "map.png", "m1_single, whose KV cache has no blocks"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    make: Any, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        draw_kvmap(make(), tmp_path / name)
    assert not (tmp_path / name).exists()
