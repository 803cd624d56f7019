"""The engine in one file gives the tokens of M4 and of Hugging Face, and loses no block."""

import ast
import copy
import dataclasses
import itertools
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import m4_prefix_chunked
from docs import tiny_engine
from docs.tiny_engine import Engine, Request
from helpers.engines import make_engine, random_prompts, tiny_model, word_tokenizer
from m1_single import SamplingParams

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "tiny_engine.py"
FAMILIES = ("llama", "qwen2", "qwen3")
SMALL = {"num_blocks": 12, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 9}
"""Room for one request of 48 tokens; most prompts need several steps."""


def engine_of(family, **fields):
    """An engine on a model of its own: it changes the model's attention."""
    return Engine(copy.deepcopy(tiny_model(family)), **{**SMALL, **fields})


def run(engine, requests, spacing=0):
    """Add a request every `spacing` steps and run all to their end. The rows of every step."""
    pending, steps = list(requests), []
    while pending or engine.scheduler.waiting or engine.scheduler.running:
        if pending and (spacing == 0 or len(steps) % spacing == 0):
            for _ in range(1 if spacing else len(pending)):
                engine.scheduler.add(pending.pop(0))
        steps.append(engine.step())
        check_blocks(engine)
    assert len(engine.kv.free_blocks) == engine.kv.num_blocks
    return steps


def check_blocks(engine):
    """Every block is free or held by as many tables as its count says."""
    kv, tables = engine.kv, [request.block_table for request in engine.scheduler.running]
    held = [block for table in tables for block in table]
    assert kv.ref_counts == [held.count(block) for block in range(kv.num_blocks)]
    assert sorted({*held, *kv.free_blocks}) == list(range(kv.num_blocks))
    assert len(set(held)) + len(kv.free_blocks) == kv.num_blocks
    assert {block: name for name, block in kv.block_of.items()} == kv.hash_of


def traffic(seed, num_requests=10):
    """Requests of all lengths, of which some begin alike. Many are sampled, few stop early."""
    rng = random.Random(seed)
    beginnings = [[], *random_prompts([8, 13], seed)]
    own = random_prompts([rng.randint(1, 17) for _ in range(num_requests)], seed + 1)
    return [
        Request(
            f"r{index}",
            rng.choice(beginnings) + prompt,
            max_tokens=rng.randint(4, 18),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            seed=rng.getrandbits(63),
            stop_token_ids=(7, 11),
        )
        for index, prompt in enumerate(own)
    ]


def tokens_of_m4(family, requests):
    """The same requests in M4."""
    engine = make_engine(m4_prefix_chunked, tiny_model(family), max_model_len=64)
    prompts = [request.prompt_token_ids for request in requests]
    params = [
        SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,
        )
        for request in requests
    ]
    return [output.token_ids for output in engine.generate(prompts, params)]


def kinds_of(steps):
    """What happened to the rows of a run, besides whole prompts and single tokens."""
    kinds, ends = set(), {}
    for row in (row for rows in steps for row in rows):
        before = ends.get(row.request, 0)
        kinds |= {"chunk"} if not row.samples else set()
        kinds |= {"prefix found"} if row.start > before else set()
        kinds |= {"preempted"} if row.start < before else set()
        ends[row.request] = row.end
    return kinds


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_m4_with_preemption_shared_beginnings_and_chunks(family):
    engine, kinds = engine_of(family), set()
    for seed, spacing in ((1, 0), (2, 2)):
        requests = traffic(seed)
        kinds |= kinds_of(run(engine, requests, spacing))
        greedy = [each for each in requests if each.temperature == 0]
        assert [each.output_token_ids for each in greedy] == tokens_of_m4(family, greedy)
        for request in (each for each in requests if each.temperature):
            alone = dataclasses.replace(request, output_token_ids=[], block_table=[])
            alone.num_computed_tokens = 0
            run(engine_of(family), [alone])
            assert alone.output_token_ids == request.output_token_ids
    assert kinds == {"chunk", "prefix found", "preempted"}


def test_a_step_mixes_decode_rows_with_the_chunk_of_a_prompt():
    requests = [Request("a", [5] * 4), Request("b", list(range(20)), max_tokens=1)]
    steps = run(engine_of("llama"), requests)
    lines = [" ".join(f"{r.request.request_id}[{r.start}:{r.end}]" for r in rows) for rows in steps]
    assert lines[:4] == ["a[0:4] b[0:5]", "a[4:5] b[5:13]", "a[5:6] b[13:20]", "a[6:7]"]


def test_a_shared_beginning_is_computed_once_and_the_last_token_always():
    engine = engine_of("llama", max_num_batched_tokens=64)
    prompt = random_prompts([8])[0]
    first, second = run(engine, [Request("a", prompt, 1), Request("b", prompt, 1)])[0]
    assert (first.start, first.end) == (0, 8)
    assert (second.start, second.end) == (4, 8)
    (later,) = run(engine, [Request("c", [*prompt, 3], 1)])[0]
    assert (later.start, later.end) == (8, 9)
    (no_beginning,) = run(engine, [Request("d", [*prompt[4:], 3], 1)])[0]
    assert (no_beginning.start, no_beginning.end) == (0, 5)
    last = Request("e", list(range(12)), 1)
    run(engine, [last])
    beginning = engine.kv.block_of[last.block_hashes[0]]
    assert list(engine.kv.free_blocks)[-1] == beginning, "what others may share is overwritten last"


def test_the_youngest_is_preempted_and_comes_back_before_those_who_wait():
    a, b, c = (Request(name, [token] * 12, max_tokens=36) for token, name in enumerate("abc"))
    steps = run(engine_of("llama", num_blocks=15, max_num_seqs=2), [a, b, c])
    come_and_go = [[row.request.request_id for row in rows] for rows in steps]
    assert [who for who, _ in itertools.groupby(come_and_go)] == [
        *(["a"], ["a", "b"], ["a"], ["b"], ["b", "c"], ["b"], ["c"])
    ]


def test_noise_is_anothers_at_each_position_and_of_each_seed():
    noise = [tiny_engine.gumbel_noise(*each, 5).tolist() for each in ((1, 0), (1, 1), (2, 0))]
    assert noise[0] not in noise[1:]
    assert noise[0] == tiny_engine.gumbel_noise(1, 0, 5).tolist()


def test_what_could_never_fit_is_refused():
    engine = engine_of("llama")
    for prompt in ([], [1] * 40):
        with pytest.raises(ValueError, match=r"\+ 16 tokens, memory for 48"):
            engine.scheduler.add(Request("a", prompt))
    with pytest.raises(ValueError, match="llama, qwen2 and qwen3"):
        engine_of("gpt2")


def test_the_file_needs_nothing_of_ours_and_names_files_that_exist():
    text = PATH.read_text(encoding="utf-8")
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
    named = re.findall(r"[\w/]+/\w+\.py", " ".join(re.findall("# Full version: (.*)", text)))
    assert len(named) >= 9
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_demo_shows_a_line_for_each_step_and_the_answers(monkeypatch, capsys):
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.chat_template = "w9 " * 24 + "{{ messages[0]['content'] }} w3"
    tokenizer.eos_token = "w2"
    for name, loaded in (
        ("AutoTokenizer", tokenizer),
        ("AutoModelForCausalLM", copy.deepcopy(tiny_model())),
    ):
        loader = SimpleNamespace(from_pretrained=lambda name, loaded=loaded: loaded)
        monkeypatch.setattr(tiny_engine, name, loader)
    monkeypatch.setattr(sys, "argv", ["tiny_engine.py", "a-model"])
    tiny_engine.main()
    lines = capsys.readouterr().out.splitlines()
    first = "   1  a 0..30  b 24..28  c 24..29  d 24..30"
    assert lines[1] == f"{first}            13  e        cached b c d"
    assert re.fullmatch(r"\d+ tokens, [\d.]+ a second", lines[lines.index("") - 1])
    assert lines[-2] == "e  What is one and one?"
    assert any("  preempted " in line for line in lines)
