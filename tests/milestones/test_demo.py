"""The demos of M2 to M5, run end to end on a tiny model: what each chapter tells must show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import m2_batching.demo
import m3_paged.demo
import m4_prefix_chunked.demo
import m5_kernels.demo
from engine_helpers import greedy, tiny_model
from m3_paged.demo import parser, small_pool
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.lab.demo.work import Work
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.trace.jsonl import read_run

pytestmark = pytest.mark.usefixtures("one_thread")
pytest_plugins = ["bench_helpers"]

MAINS = {
    "m2": m2_batching.demo.main,
    "m3": m3_paged.demo.main,
    "m4": m4_prefix_chunked.demo.main,
    "m5": m5_kernels.demo.main,
}
Demo = Callable[..., tuple[str, list[dict[str, Any]]]]
small = pytest.mark.usefixtures("no_pixels")


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Demo:
    """Runs a milestone's demo with options; returns what it printed and its trace."""

    def run(milestone: str, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
        trace = tmp_path / "trace.jsonl"
        options = ["--model", "tiny-llama", "--out", str(tmp_path), "--trace", str(trace)]
        assert MAINS[milestone]([*options, *arguments]) == 0
        captured = capsys.readouterr()
        assert not captured.err.strip()
        lines = captured.out.splitlines()
        pictures = [line for line in lines if line.startswith(("timeline: ", "kvmap: "))]
        assert lines[-1] == pictures[-1]
        for line in pictures:
            assert Path(line.partition(": ")[2]).read_bytes().startswith(b"\x89PNG\r\n")
        assert all(len(line) <= 80 for line in lines if line not in pictures)
        return captured.out, [record.to_dict() for record in read_run(trace)]

    return run


def in_a_line(text: str) -> str:
    return " ".join(text.split())


# --- M2: continuous batching --------------------------------------------------------------------

SHORT = ["--max-tokens", "6"]
THREE_ROWS = ["--max-num-seqs", "3"]


def test_m2_a_request_waits_for_a_row_and_joins_mid_flight(demo: Demo) -> None:
    out, trace = demo("m2")
    assert [len(record["batch"]) for record in trace] == [2] * 60 + [1] * 40
    assert [record["step"] for record in trace if record["waiting"] == ["r2"]] == [*range(10)]
    assert trace[10]["admitted"] == ["r2"]
    assert {row["phase"] for row in trace[10]["batch"]} == {"decode", "prefill"}
    assert "waits     r2: no row is left: max_num_seqs=2" in out
    steps = next(line.split() for line in out.splitlines() if line.split()[:1] == ["steps"])
    assert steps == ["steps", "150", "100"], "in the static batch r2 waits for r1, too"
    assert "static and continuous gave the same tokens." in out


@small
def test_m2_arrivals_are_ones_own_or_random(demo: Demo) -> None:
    _, trace = demo("m2", "--arrivals", "0,0,3", *THREE_ROWS, *SHORT)
    assert [record["step"] for record in trace if "r2" in record["admitted"]] == [3]
    _, trace = demo("m2", "--rate", "500", *SHORT)
    assert sorted(name for record in trace for name in record["admitted"]) == ["r0", "r1", "r2"]


def admissions(trace: list[dict[str, Any]]) -> list[int]:
    """Prompt lengths in the order of admission: ids differ when a later request comes first."""
    return [
        row["num_new_tokens"] for record in trace for row in record["batch"] if not row["start"]
    ]


@small
def test_m2_priority_serves_the_most_urgent_first(demo: Demo) -> None:
    prompts = ["--prompts", "one", "one two", "one two three"]
    one_row = ["--max-num-seqs", "1", "--no-static", *SHORT, *prompts]
    assert admissions(demo("m2", *one_row)[1]) == [1, 2, 3]
    priority = ["--policy", "priority"]
    assert admissions(demo("m2", *one_row, *priority)[1]) == [3, 2, 1]
    assert admissions(demo("m2", *one_row, *priority, "--priorities", "2,0,1")[1]) == [2, 3, 1]
    assert "changes nothing without --policy" in demo("m2", *SHORT, "--priorities", "2,0,1")[0]


@small
def test_m2_step_budgets_are_compared(demo: Demo) -> None:
    out, trace = demo("m2", "--max-num-batched-tokens", "32,2048", *THREE_ROWS, *SHORT)
    assert "budget 32" in out
    assert "budget 2048" in out
    admitted = [record["step"] for record in trace for _ in record["admitted"]]
    assert admitted == [0, 0, 1], "3 + 26 tokens fill a step of 32"
    assert "same tokens" in out


# --- M3: blocks ---------------------------------------------------------------------------------


def test_m3_preemption_and_resumption_happen_on_screen(demo: Demo) -> None:
    out, trace = demo("m3")
    preempted, resumed = (
        next(record["step"] for record in trace if record[change])
        for change in ("preempted", "resumed")
    )
    assert 0 < preempted < resumed
    for what, step in (
        ("The first step", 0),
        ("The pool is as good as full", preempted - 1),
        ("A preemption: a block is needed and none is free", preempted),
        ("A resumption: the preempted request is back", resumed),
    ):
        assert f"{what} (step {step})" in out
    assert f"preempted {trace[preempted]['preempted'][0]['request_id']}: no free block" in out
    assert "resumed   r" in out
    maps = out.split("\nblocks   ")[1:]
    assert len(maps) == 4
    cells = maps[0].splitlines()[1].split()
    owner = {row["blocks"][0]: row["request_id"] for row in trace[0]["batch"]}
    assert cells[1:13:2] == [owner[block] for block in range(6)]
    assert cells[13:] == ["-", "-"]


@small
def test_m3_swap_gives_the_tokens_of_a_pool_with_room(demo: Demo) -> None:
    roomy, trace = demo("m3", "--kv-cache-tokens", "4096")
    assert not any(record["preempted"] for record in trace)
    assert "The pool at its fullest" in roomy
    out, trace = demo("m3", "--preemption", "swap")
    kinds = {event["type"] for record in trace for event in record["events"]}
    assert {"swap_out", "swap_in"} <= kinds
    assert "0 tokens recomputed" in out
    answers = [text.split("Answers")[1].split("Requests")[0] for text in (roomy, out)]
    assert answers[0] == answers[1]


@small
def test_m3_completions_share_blocks_and_copy_on_write(demo: Demo) -> None:
    out, trace = demo("m3", "--n", "3")
    copies = [e for record in trace for e in record["events"] if e["type"] == "copy_on_write"]
    assert "Copy-on-write: a sharer writes into a shared block" in out
    assert f"copies on write {len(copies)} blocks" in in_a_line(out)
    assert all(name in out.split("Answers")[1] for name in ("r0/1", "r0/2", "r1/1", "r2/2"))
    out, _ = demo("m3", "--n", "2", "--block-size", "2", "--max-tokens", "9")
    assert "r0+1" in out, "full blocks of the prompt stay shared"


def test_m3_a_step_holds_the_longest_prompt_and_a_token_of_each_row() -> None:
    """The demo has no option for a step's tokens: nobody could raise them."""
    config = m3_paged.EngineConfig

    def tokens_of_a_step(prompt_len: int, *options: str) -> int:
        milestone = SimpleNamespace(EngineConfig=config, LLMEngine=lambda model, **told: told)
        loaded = LoadedModel(tiny_model(max_position_embeddings=4096), None, "tiny")
        item = WorkItem([5] * prompt_len, greedy(2))
        told = Work(parser().parse_args(options), loaded, [item]).engine(milestone)
        return told["max_num_batched_tokens"]

    assert tokens_of_a_step(30) == config.max_num_batched_tokens == 2048
    assert tokens_of_a_step(3000) == 3002
    assert tokens_of_a_step(3000, "--max-num-seqs", "3500") == 3500


def test_m3_the_pool_is_made_for_tokens_that_the_model_can_have() -> None:
    args = parser().parse_args([])
    loaded = LoadedModel(tiny_model(), None, "tiny")
    for max_tokens in (1000, 10**12):
        work = Work(args, loaded, [WorkItem([5] * 24, greedy(max_tokens))] * 3)
        assert small_pool(args, work) == 1536


# --- M4: prefix cache, chunks, guesses ----------------------------------------------------------


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


@pytest.mark.parametrize("arguments", [[], ["--spacing", "0"]], ids=["one by one", "all at once"])
def test_m4_the_first_request_pays_and_the_others_hit(demo: Demo, arguments: list[str]) -> None:
    out, trace = demo("m4", "--part", "1", "--max-tokens", "4", *arguments)
    assert column(out, "Requests, times in ms", "saved", "r") == ["-", *["384"] * 7]
    first_rows: dict[str, Any] = {}
    for record in trace:
        for row in record["batch"]:
            first_rows.setdefault(row["request_id"], row)
    assert first_rows["r0"]["num_new_tokens"] > 384
    assert all(first_rows[f"r{i}"]["num_new_tokens"] < 16 for i in range(1, 8))
    assert "prefix cache: 7 of 8 requests hit" in in_a_line(out)
    assert "cached and not cached gave the same tokens." in out


@small
def test_m4_the_tree_shows_holders_and_what_is_free_but_cached(demo: Demo) -> None:
    out, _ = demo("m4", "--part", "1")
    tree = out[out.index("The prefix cache after step 28") :].splitlines()
    assert "24 blocks: 0-23" in tree[2]
    assert "refs 6: r2 r3 r4 r5 r6 r7" in tree[2]
    free = [line for line in tree if "refs 0, cached, was of" in line]
    assert [line.split()[-1] for line in free] == ["r0", "r1"]


@small
def test_m4_a_long_prompt_stalls_decodes_only_under_prefill_first(demo: Demo) -> None:
    out, trace = demo("m4", "--part", "2")
    assert "mixed and prefill_first gave the same tokens." in out
    for policy in ("mixed", "prefill_first"):
        longest, first_token = (
            column(out, "The 4 running requests", name, policy)[0] for name in ("max", "TTFT of r4")
        )
        told = f"With {policy} the others waited {longest} ms at most"
        assert f"{told}, and r4 had its first token after {first_token} ms." in in_a_line(out)
    chunks = [r for r in trace if any(row["request_id"] == "r4" for row in r["batch"])]
    assert [len(record["batch"]) for record in chunks[:7]] == [5] * 7, "four decode beside it"
    assert [record["num_prefill_tokens"] for record in chunks[:7]] == [60] * 6 + [40]
    lines = out[out.index("prefill_first: the long prompt's first chunk") :].splitlines()
    assert "64 prefill tokens" in lines[1]


@small
def test_m4_a_request_that_repeats_guesses(demo: Demo) -> None:
    out, trace = demo("m4", "--part", "3", "--max-tokens", "8")
    guessed = column(out, "What guesses brought", "guessed", "r")
    num_in_trace = sum(row.get("num_draft_tokens", 0) for r in trace for row in r["batch"])
    assert sum(map(int, guessed)) == num_in_trace > 0
    assert "guesses and no guesses gave the same tokens." in out


@small
def test_m4_own_questions(demo: Demo) -> None:
    own = ["--prompts", "one", "two three", "--system-prompt", "a b c " * 20]
    out, _ = demo("m4", "--part", "1", "--max-tokens", "2", *own)
    assert column(out, "Requests, times in ms", "saved", "r") == ["-", "48"]


# --- M5: kernels --------------------------------------------------------------------------------


def test_m5_takes_the_steps_of_m4_to_the_same_tokens(demo: Demo) -> None:
    out, trace = demo("m5")
    assert [len(record["batch"]) for record in trace] == [3] * 10 + [2] * 40 + [1] * 50
    assert "M4 and M5 gave the same tokens" in out
    assert "torch's kernels" in out or "Triton kernels" in out


@small
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--enforce-eager"], "M4 and M5 gave the same tokens"),
        (["--model", "tiny-gpt2"], "there is no fused decoder for gpt2"),
    ],
)
def test_m5_says_what_computes(demo: Demo, options: list[str], told: str) -> None:
    assert told in in_a_line(demo("m5", *options, *SHORT)[0])


# --- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milestone", "arguments", "message"),
    [
        ("m2", ["--max-num-batched-tokens", "16"], "the prompt has 26 tokens"),
        ("m2", ["--arrivals", "0,1"], "--arrivals has 2 of the 3 numbers that it needs"),
        ("m2", ["--priorities", "1"], "--priorities has 1 of the 3 numbers that it needs"),
        ("m3", ["--kv-cache-tokens", "50"], "3 KV blocks of 16 hold 48 tokens"),
        ("m3", ["--n", "9"], "n=9 completions start together, but max_num_seqs=8"),
        ("m4", ["--part", "2", "--long-prompt-tokens", "100000"], "the prompt has 1024 tokens"),
    ],
)
def test_bad_values_end_with_a_message_and_leave_nothing(
    milestone: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options = ["--model", "tiny-llama", "--out", str(tmp_path), *arguments]
    options += ["--no-static"] if milestone == "m2" else []
    assert MAINS[milestone](options) == 2
    assert message in in_a_line(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("milestone", "arguments"),
    [
        ("m2", ["--arrivals", "0,-1,0"]),
        ("m2", ["--arrivals", "a,b,c"]),
        ("m2", ["--rate", "nan"]),
        ("m2", ["--arrivals", "0,0,0", "--rate", "1"]),
        ("m2", ["--max-num-batched-tokens", "0"]),
        ("m4", ["--spacing", "-1"]),
    ],
)
def test_bad_options_end_with_usage(
    milestone: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        MAINS[milestone](["--model", "tiny-llama", *arguments])
    assert ended.value.code == 2
    assert "usage: python -m " in capsys.readouterr().err


def test_an_interrupt_ends_a_demo_cleanly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = m3_paged.LLMEngine.step

    def interrupted(engine: Any) -> Any:
        if engine.stats()["steps"] == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(m3_paged.LLMEngine, "step", interrupted)
    assert MAINS["m3"](["--model", "tiny-llama", "--out", str(tmp_path)]) == 130
    assert "Unfinished requests were aborted" in capsys.readouterr().err
