"""The demos, run end to end on a tiny model: what each chapter tells must show."""

from __future__ import annotations

import bdb
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import m3_paged
from helpers.engines import greedy, tiny_model
from m1_single import LLMEngine
from m3_paged.demo import parser, small_pool
from milestone_llm import MILESTONES
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.lab.demo.work import Work
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.trace.jsonl import read_run

pytestmark = pytest.mark.usefixtures("one_thread", "no_pixels")
pytest_plugins = ["helpers.benches"]

MAINS = {name[:2]: importlib.import_module(f"{name}.demo").main for name in MILESTONES}
TINY = ["--model", "tiny-llama", "--out"]
Demo = Callable[..., tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Demo:
    """Runs a milestone's demo with options; returns what it printed and its trace."""

    def run(milestone: str, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
        trace = tmp_path / "trace.jsonl"
        options = [*TINY, str(tmp_path), "--trace", str(trace)]
        assert MAINS[milestone]([*options, *arguments]) == 0
        captured = capsys.readouterr()
        assert re.fullmatch(r"Loading tiny-[\w-]+\.\n", captured.err)
        lines = captured.out.splitlines()
        pictures = [line for line in lines if line.startswith(("timeline: ", "kvmap: "))]
        assert milestone == "m5" or lines[-1] == pictures[-1]  # M5 draws on a GPU only
        for line in pictures:
            assert Path(line.partition(": ")[2]).read_bytes().startswith(b"\x89PNG\r\n")
        assert all(len(line) <= 80 for line in lines if line not in pictures)
        return captured.out, [record.to_dict() for record in read_run(trace)]

    return run


def in_a_line(text: str) -> str:
    return " ".join(text.split())


def answers(out: str) -> str:
    return out[out.index("Answers") : out.index("Requests")]


# --- what each tells ----------------------------------------------------------------------------

SHORT = ["--max-tokens", "6"]
ONE_CACHE = [
    "cached and not cached gave the same tokens.",
    "prefix cache: 7 of 8 requests hit",
]
TOLD: dict[str, tuple[list[str], list[str]]] = {
    "m1": ([], ["step 0 ", "step 10 ", "step 99 ", "░ padding", "26 tokens in, 100 out", "TTFT"]),
    "m2": (
        [],
        [
            "waits r2: no row is left: max_num_seqs=2",
            "steps 150 100",  # in the static batch r2 waits for r1, too
            "static and continuous gave the same tokens.",
        ],
    ),
    "m2 budgets": (
        ["--max-num-batched-tokens", "32,2048", "--max-num-seqs", "3", *SHORT],
        ["budget 32 and budget 2048 gave the same tokens"],
    ),
    "m3": (
        [],
        ["as good as full", "A preemption", "A resumption", ": no free block for r"],
    ),
    "m3 swap": (["--preemption", "swap"], ["A preemption", "0 tokens recomputed"]),
    "m3 completions": (["--n", "3"], ["copy_on_write", "a sharer writes into a shared block"]),
    "m4 one by one": (
        ["--part", "1"],
        [*ONE_CACHE, "24 blocks: 0-23 refs 6: r2 r3 r4 r5 r6 r7", "r7 390 24 384 "],
    ),
    "m4 all at once": (["--part", "1", "--spacing", "0", "--max-tokens", "4"], ONE_CACHE),
    "m4 a long prompt": (["--part", "2"], ["mixed and prefill_first gave the same tokens."]),
    "m4 guesses": (
        ["--part", "3", "--max-tokens", "8"],
        ["What guesses brought", "guesses and no guesses gave the same tokens."],
    ),
    "m5": ([], ["M4 and M5 gave the same tokens"]),
    "m5 eager": (["--enforce-eager", *SHORT], ["M4 and M5 gave the same tokens"]),
    "m5 gpt2": (["--model", "tiny-gpt2", *SHORT], ["M5: fused decoder, merged products"]),
}


@pytest.mark.parametrize("scene", TOLD)
def test_a_demo_shows_what_its_chapter_tells(demo: Demo, scene: str) -> None:
    arguments, told = TOLD[scene]
    out, _ = demo(scene[:2], *arguments)
    assert len(out.splitlines()) < 200, "telling steps, not all"
    for text in told:
        assert text in in_a_line(out)


# --- its options --------------------------------------------------------------------------------


def test_own_prompts_lengths_and_seeds(demo: Demo) -> None:
    out, trace = demo("m1", "--prompts", "two words", "[bold]one[/]", "--max-tokens", "3")
    assert len(trace) == 3
    assert "2 tokens in, 3 out, ended by length" in out
    assert "1 token in, 3 out, ended by length" in out
    one, again, two = (
        answers(demo("m1", "--temperature", "1", "--seed", seed, "--max-tokens", "8")[0])
        for seed in "112"
    )
    assert one == again != two


def test_trace_on_the_console_shows_every_step_once(capsys: Any, tmp_path: Path) -> None:
    options = ["--trace", "console", "--max-tokens", "4", "--prompts", "a b", "c"]
    assert MAINS["m1"]([*TINY, str(tmp_path), *options]) == 0
    out = capsys.readouterr().out
    assert [out.count(f"step {step}  m1_single") for step in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("door", ["demo", "bench"])
def test_the_first_screen_needs_no_torch(door: str) -> None:
    """`--help` and wrong options of all milestones answer at once."""
    modules = [f"{name}.{door}" for name in MILESTONES] + ["m4_prefix_chunked.tools.stress"]
    program = f"""
import importlib, sys
sys.modules.update(torch=None, transformers=None)
for name in {modules}:
    try:
        importlib.import_module(name).main(["--help"])
    except SystemExit as ended:
        assert ended.code == 0, name
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


THREE_ROWS = ["--max-num-seqs", "3"]


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


def test_m2_priority_serves_the_most_urgent_first(demo: Demo) -> None:
    prompts = ["--prompts", "one", "one two", "one two three"]
    one_row = ["--max-num-seqs", "1", "--no-static", *SHORT, *prompts]
    assert admissions(demo("m2", *one_row)[1]) == [1, 2, 3]
    priority = ["--policy", "priority"]
    assert admissions(demo("m2", *one_row, *priority)[1]) == [3, 2, 1]
    assert admissions(demo("m2", *one_row, *priority, "--priorities", "2,0,1")[1]) == [2, 3, 1]
    assert "changes nothing without --policy" in demo("m2", *SHORT, "--priorities", "2,0,1")[0]


def test_m3_a_step_holds_the_longest_prompt_and_a_pool_what_the_model_can_have() -> None:
    """The demo has no option for a step's tokens: nobody could raise them."""

    def tokens_of_a_step(prompt_len: int, *options: str) -> int:
        milestone = SimpleNamespace(
            EngineConfig=m3_paged.EngineConfig, LLMEngine=lambda model, **told: told
        )
        loaded = LoadedModel(tiny_model(max_position_embeddings=4096), None, "tiny")
        item = WorkItem([5] * prompt_len, greedy(2))
        told = Work(parser().parse_args(options), loaded, [item]).engine(milestone)
        return told["max_num_batched_tokens"]

    assert tokens_of_a_step(30) == 2048
    assert tokens_of_a_step(3000) == 3002
    assert tokens_of_a_step(3000, "--max-num-seqs", "3500") == 3500
    args, loaded = parser().parse_args([]), LoadedModel(tiny_model(), None, "tiny")
    for max_tokens in (1000, 10**12):
        work = Work(args, loaded, [WorkItem([5] * 24, greedy(max_tokens))] * 3)
        assert small_pool(args, work) == 1536


# --- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milestone", "arguments", "message"),
    [
        ("m1", ["--model", "tiny-nothing"], "tiny-llama"),
        ("m1", ["--temperature", "-1"], "temperature must be a number from 0"),
        ("m1", ["--trace", "trace.txt"], "trace.txt"),
        ("m1", ["--out", "/dev/null/out"], "/dev/null"),
        ("m1", ["--trace", "/dev/null/t.jsonl"], "/dev/null"),
        ("m2", ["--max-num-batched-tokens", "16"], "the prompt has 26 tokens"),
        ("m2", ["--arrivals", "0,1"], "--arrivals has 2 of the 3 numbers that it needs"),
        ("m2", ["--priorities", "1"], "--priorities has 1 of the 3 numbers that it needs"),
        ("m2", ["--arrivals", "0,-1,0"], "usage: python -m "),
        ("m2", ["--rate", "nan"], "usage: python -m "),
        ("m2", ["--arrivals", "0,0,0", "--rate", "1"], "usage: python -m "),
        ("m2", ["--max-num-batched-tokens", "0"], "usage: python -m "),
        ("m3", ["--kv-cache-tokens", "50"], "3 KV blocks of 16 hold 48 tokens"),
        ("m3", ["--n", "9"], "n=9 completions start together, but max_num_seqs=8"),
        ("m4", ["--part", "2", "--long-prompt-tokens", "100000"], "the prompt has 1024 tokens"),
        ("m4", ["--spacing", "-1"], "usage: python -m "),
    ],
)
def test_bad_values_end_with_a_message_before_the_work_and_leave_nothing(
    milestone: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LLMEngine, "step", lambda self: pytest.fail("there was work"))
    options = ["--no-static"] if milestone == "m2" else []
    try:
        status = MAINS[milestone]([*TINY, str(tmp_path), *options, *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in in_a_line(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", [KeyboardInterrupt, bdb.BdbQuit], ids=["Ctrl-C", "quit in pdb"])
def test_the_user_s_end_is_a_clean_end(
    end: type[BaseException], capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []

    def step(self: LLMEngine) -> list[object]:
        engines.append(self)
        raise end

    monkeypatch.setattr(LLMEngine, "step", step)
    assert MAINS["m1"]([*TINY, str(tmp_path)]) == 130
    assert "Stopped" in capsys.readouterr().err
    assert not engines[0].has_unfinished_requests()
