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
from milestone_llm.lab.explorer.kv_figures import kv_figures
from milestone_llm.lab.plots.block_history import BlockState, block_history
from milestone_llm.lab.plots.kvmap import draw_kvmap
from milestone_llm.trace.records import StepRecord

STORM = {"block_size": 8, "kv_cache_tokens": 96}
"""Memory for about half of the requests."""
FORKS = {"n": 3, "block_size": 8, "kv_cache_tokens": 320}
"""Three completions of each prompt, whose last block is not full."""


@functools.cache
def trace(package: Any = m3_paged, n: int = 1, **fields: Any) -> list[StepRecord]:
    """Of an engine that has served four requests of 18 tokens in and 12..30 out."""
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
    return list(engine.tracer.records)


# --- block history --------------------------------------------------------------------------


def test_history_agrees_with_the_pool_and_names_all_holders_of_a_shared_block() -> None:
    for fields in (STORM, FORKS):
        records = trace(**fields)
        for state, record in zip(block_history(records), records, strict=True):
            assert (state.num_blocks, state.block_size) == (record.kv.total, 8)
            if not record.finished:  # the record's numbers are those after the step
                forked = any(event.type == "share" for event in record.events)
                assert len(state.holders) == record.kv.used
                assert forked or state.num_stored_tokens == record.kv.stored_tokens
                assert state.num_reserved_tokens == record.kv.reserved_tokens
    shared = [state.shared for state in block_history(records)]
    assert shared[0] == {}
    assert ["r0", "r0/1", "r0/2"] in shared[1].values()


def test_a_region_is_one_block_of_max_model_len() -> None:
    states = list(block_history(trace(m2_batching)))
    assert (states[0].num_blocks, states[0].block_size) == (12, 64)
    assert states[0].stored == {0: 18, 1: 18, 2: 18, 3: 18}


def test_a_request_that_got_no_row_keeps_its_blocks() -> None:
    records = trace(**STORM)[:2]
    lost, *others = records[1].batch
    states = list(block_history([records[0], replace(records[1], batch=others)]))
    assert [lost.request_id] in states[1].holders.values()


def test_figures_of_a_run() -> None:
    figures = kv_figures(trace(**STORM))
    assert figures["num_preemptions"] == figures["num_resumptions"] > 0
    assert figures["num_recomputed_tokens"] > 0 == figures["num_swapped_blocks"]
    assert (figures["total"], figures["max_concurrent"]) == (12, 4)
    assert 0 < figures["waste_per_request"] <= 8 / 2 + 1
    regions = kv_figures(trace(m2_batching))
    assert regions["waste_per_request"] > 5 * figures["waste_per_request"]
    assert regions["waste_share"] > 0.5


# --- the map in the terminal ----------------------------------------------------------------


def block_map(state: BlockState, order: list[str], width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_block_map(state, order, Console(file=file, width=width, color_system=None))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_map_shows_owner_and_fill_of_each_block_and_only_a_full_one_looks_full() -> None:
    holders = {0: ["消息"], 1: ["消息", "r0/1"], 4: ["r1"]}
    state, order = BlockState(3, 5, 16, holders, {0: 16, 1: 15, 4: 1}), ["消息", "r1", "r0/1"]
    lines = block_map(state, order).splitlines()
    assert lines[0] == "blocks   3 of 5 used, 2 free, 1 shared; 32 tokens in 48 places"
    assert lines[1].split() == ["0", "消息", "████", "消息+1", "███░", "-", "-"]
    assert lines[2].split() == ["4", "r1", "█░░░"]
    assert "??+1 ###." in block_map(state, order, encoding="ascii")


@pytest.mark.parametrize("width", [40, 200])
def test_of_a_large_pool_the_first_blocks_are_shown_and_the_rest_is_summed_up(width: int) -> None:
    state = BlockState(0, 20_000, 16)
    for block in range(0, 20_000, 2):
        state.holders[block], state.stored[block] = [f"r{block // 1000}"], 8
    lines = block_map(state, [f"r{number}" for number in range(20)], width).splitlines()
    assert len(lines) <= 2 + 16 + 1
    assert lines[-1].startswith("… 19,")
    assert max(map(len, lines)) <= width


# --- the picture ----------------------------------------------------------------------------


def test_every_kind_of_trace_gives_a_picture_that_names_what_happened(tmp_path: Path) -> None:
    for records, words in (
        (trace(**STORM), ("r0", "r3", "reserved, empty", "free", "preempted", "resumed")),
        (trace(**FORKS), ("r0", "r0/2", "copy-on-write")),
        (trace(m2_batching), ("r0",)),
    ):
        text = draw_kvmap(records, tmp_path / "deep" / "map.svg").read_text()
        assert text.startswith("<?xml")
        for each in words:
            assert f"<!-- {each} -->" in text, each


@pytest.mark.parametrize("fields", [STORM, FORKS])
def test_the_picture_and_the_summary_of_a_run_agree_on_how_much_is_empty(
    fields: dict[str, int], tmp_path: Path
) -> None:
    records = trace(**fields)
    text = draw_kvmap(records, tmp_path / "map.svg").read_text()
    assert f" {kv_figures(records)['waste_share']:.1%} " in text


@pytest.mark.parametrize(
    ("package", "name", "message"),
    [
        (m3_paged, "map.gif", "a map is written as .png or .svg"),
        (m1_single, "map.png", "m1_single, whose KV cache has no blocks"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    package: Any, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        draw_kvmap(trace(package), tmp_path / name)
    assert not (tmp_path / name).exists()
