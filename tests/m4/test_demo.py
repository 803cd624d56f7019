"""The demo of prefix caching and chunked prefill, run end to end on a tiny model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import m4_prefix_chunked
from engine_helpers import greedy, make_engine, random_prompts, run_to_end
from m4_prefix_chunked.demo import main
from m4_prefix_chunked.tools.prefix_tree import Node, PrefixTree, print_prefix_tree
from milestone_llm.trace.jsonl import read_run

PNG = b"\x89PNG\r\n"


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the demo with options; returns what it printed and its trace."""

    def run(*arguments: str) -> tuple[str, list[dict[str, Any]]]:
        trace = tmp_path / "trace.jsonl"
        options = ["--model", "tiny-llama", "--out", str(tmp_path), "--trace", str(trace)]
        assert main([*options, *arguments]) == 0
        captured = capsys.readouterr()
        assert not captured.err.strip()
        lines = captured.out.splitlines()
        assert all(len(line) <= 80 for line in lines if not line.startswith("timeline"))
        pictures = [line.partition(": ")[2] for line in lines if line.startswith("timeline: ")]
        assert lines[-1] == f"timeline: {pictures[-1]}"
        assert all(Path(picture).read_bytes().startswith(PNG) for picture in pictures)
        return captured.out, [record.to_dict() for record in read_run(trace)]

    return run


def column(out: str, headline: str, name: str, first: str) -> list[str]:
    """A column of the table below a headline, of the rows that begin with `first`."""
    lines = out[out.index(headline) :].splitlines()
    heads = next(line for line in lines[1:] if name in line)
    place = heads.index(name) + len(name)
    rows = []
    for line in lines[2:]:
        if not line.strip():
            break
        if line.split()[0].startswith(first) and line.split()[0] != "request":
            rows.append(line[:place].split()[-1])
    return rows


def test_the_first_request_pays_and_the_others_hit(demo: Any) -> None:
    out, trace = demo("--part", "1", "--max-tokens", "4")
    saved = column(out, "Requests, times in ms", "saved", "r")
    assert saved == ["-", *["384"] * 7]
    first_rows = {}
    for record in trace:
        for row in record["batch"]:
            first_rows.setdefault(row["request_id"], row)
    assert first_rows["r0"]["num_new_tokens"] > 384
    assert all(first_rows[f"r{i}"]["num_new_tokens"] < 16 for i in range(1, 8))
    assert "prefix cache: 7 of 8 requests hit" in " ".join(out.split())
    assert "cached and not cached gave the same tokens." in out


@pytest.mark.usefixtures("no_pixels")
def test_a_request_that_repeats_guesses(demo: Any) -> None:
    out, trace = demo("--part", "3", "--max-tokens", "8")
    guessed = column(out, "What guesses brought", "guessed", "r")
    in_trace = [sum(row.get("num_draft_tokens", 0) for r in trace for row in r["batch"])]
    assert [sum(map(int, guessed))] == in_trace
    assert "guesses and no guesses gave the same tokens." in out


@pytest.mark.usefixtures("no_pixels")
def test_the_tree_shows_holders_and_what_is_free_but_cached(demo: Any) -> None:
    out, _ = demo("--part", "1")
    tree = out[out.index("The prefix cache after step 28") :].splitlines()
    assert "24 blocks: 0-23" in tree[2]
    assert "refs 6: r2 r3 r4 r5 r6 r7" in tree[2]
    free = [line for line in tree if "refs 0, cached, was of" in line]
    assert [line.split()[-1] for line in free] == ["r0", "r1"]
    assert any("refs 1: r2" in line for line in tree)


@pytest.mark.usefixtures("no_pixels")
def test_all_at_once_still_only_one_pays(demo: Any) -> None:
    out, trace = demo("--part", "1", "--spacing", "0", "--max-tokens", "2")
    assert column(out, "Requests, times in ms", "saved", "r") == ["-", *["384"] * 7]
    assert len(trace[0]["admitted"]) == 8


@pytest.mark.usefixtures("no_pixels")
def test_blocks_that_nothing_fills_are_not_shared(demo: Any) -> None:
    out, _ = demo("--part", "1", "--block-size", "512", "--max-tokens", "2")
    assert "saved" not in out[out.index("Requests, times in ms") : out.index("Answers")]
    assert "prefix cache: 0 of 8 requests hit" in " ".join(out.split())


@pytest.mark.usefixtures("no_pixels")
def test_a_long_prompt_stalls_decodes_only_under_prefill_first(demo: Any) -> None:
    out, trace = demo("--part", "2")
    assert column(out, "The 4 running requests", "p99", "mixed")
    assert "mixed and prefill_first gave the same tokens." in out
    words = " ".join(out.split())
    for policy in ("mixed", "prefill_first"):
        longest, first_token = (
            column(out, "The 4 running requests", name, policy)[0] for name in ("max", "TTFT of r4")
        )
        told = f"With {policy} the others waited {longest} ms at most"
        assert f"{told}, and r4 had its first token after {first_token} ms." in words
    assert "a little later" not in words, "which of the two is later is for the figures to say"
    chunks = [r for r in trace if any(row["request_id"] == "r4" for row in r["batch"])]
    assert [len(record["batch"]) for record in chunks[:7]] == [5] * 7, "four decode beside it"
    assert [record["num_prefill_tokens"] for record in chunks[:7]] == [60] * 6 + [40]
    lines = out[out.index("prefill_first: the long prompt's first chunk") :].splitlines()
    assert "64 prefill tokens" in lines[1]


@pytest.mark.usefixtures("no_pixels")
def test_own_questions_and_bad_options(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--prompts", "one", "two three", "--system-prompt", "a b c " * 20]
    out, _ = demo("--part", "1", "--max-tokens", "2", *own)
    assert column(out, "Requests, times in ms", "saved", "r") == ["-", "48"]
    with pytest.raises(SystemExit):
        main(["--model", "tiny-llama", "--spacing", "-1"])
    assert "--spacing: -1 is below 0" in capsys.readouterr().err
    too_long = ["--part", "2", "--long-prompt-tokens", str(10**5)]
    assert main(["--model", "tiny-llama", *too_long]) == 2
    said = capsys.readouterr().err
    assert "the prompt has 1024 tokens, but max_model_len=1024" in said, "no more were made"


# --- the tree by itself -------------------------------------------------------------------------


def drawn(tree: PrefixTree, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_prefix_tree(tree, Console(file=file, width=80))
    file.seek(0)
    lines = file.read().splitlines()
    assert all(len(line) <= 80 for line in lines)
    return [line.rstrip() for line in lines]


def tree_of_three() -> tuple[Any, list[Any], PrefixTree]:
    """Two conversations with one beginning, one of them done, and a stranger."""
    engine = make_engine(m4_prefix_chunked, block_size=4, max_model_len=32)
    (shared, own_a, own_b, other) = random_prompts([8, 5, 6, 4])
    engine.add_request(shared + own_a, greedy(2))
    requests = list(engine.requests.values())
    run_to_end(engine)
    engine.add_request(shared + own_b, greedy(8))
    engine.add_request(other, greedy(8))
    requests += list(engine.requests.values())
    engine.step()
    return engine, requests, PrefixTree.of(engine.scheduler.prefix_cache, requests)


def test_chains_are_collapsed_and_parted_where_requests_part() -> None:
    engine, requests, tree = tree_of_three()
    shared, stranger = tree.roots
    assert (shared.blocks, shared.holders, shared.visitors) == ([0, 1], ["r1"], ["r0", "r1"])
    assert [(child.holders, child.visitors) for child in shared.children] == [
        ([], ["r0"]),
        (["r1"], ["r1"]),
    ]
    assert (stranger.holders, len(stranger.blocks)) == (["r2"], 1)
    assert stranger.token_ids == requests[2].token_ids[:4]
    assert tree.num_cached_free == 1
    for node in (shared, *shared.children, stranger):
        counts = [engine.scheduler.kv.pool.ref_counts[block] for block in node.blocks]
        assert counts == [len(node.holders)] * len(counts)


def test_a_tree_without_colour_in_ascii() -> None:
    _, _, tree = tree_of_three()
    lines = drawn(tree, "ascii")
    assert lines[0].startswith("blocks of 4 tokens: # 5 in use, + 1 free but cached, ")
    assert lines[1].startswith("# 2 blocks: 0 1")
    assert lines[1].endswith("refs 1: r1")
    assert lines[3].startswith("+-- + 1 block: 2")
    assert lines[3].endswith("refs 0, cached, was of r0")
    assert lines[5].startswith("`-- # 1 block: ")


def test_blocks_and_requests_stand_apart_in_a_branch_too() -> None:
    many = Node(list(range(100, 180, 10)), [1] * 32, ["r1"])
    tree = PrefixTree([Node([0], [1] * 4, ["r1", "r2"], children=[many])], 4, 9, 0, 0)
    assert drawn(tree)[3].startswith("└── █ 8 blocks: 100 110 … 170  refs 1: r1")


def test_an_evicted_block_leaves_the_tree() -> None:
    engine, requests, before = tree_of_three()
    while engine.has_unfinished_requests():
        engine.step()
    for prompt in random_prompts([24] * 6, seed=1):
        engine.generate([prompt], greedy(1))
    after = PrefixTree.of(engine.scheduler.prefix_cache, requests)
    assert before.roots
    assert not after.roots
    assert drawn(after)[0].startswith("blocks of 4 tokens")


@pytest.mark.parametrize("salts", [("a", "a"), ("a", "b")])
def test_tenants_with_different_salts_have_trees_of_their_own(salts: tuple[str, str]) -> None:
    engine = make_engine(m4_prefix_chunked, block_size=4, max_model_len=32)
    (prompt,) = random_prompts([9])
    for salt in salts:
        engine.add_request(prompt, greedy(4, cache_salt=salt))
    requests = list(engine.requests.values())
    engine.step()
    tree = PrefixTree.of(engine.scheduler.prefix_cache, requests)
    assert len(tree.roots) == len(set(salts))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
