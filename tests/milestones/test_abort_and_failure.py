"""Requests that leave early, and steps that raise: nothing is left behind, nobody else notices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import m3_paged
import m4_prefix_chunked
import m5_kernels
from helpers.engines import (
    as_text,
    assert_empty,
    break_at_call,
    every_milestone,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
    word_tokenizer,
)

PROMPTS = random_prompts([6, 3, 9, 4], seed=4)
EXPECTED = [hf_greedy("llama", prompt, 8) for prompt in PROMPTS]


def add_all(engine: Any, names: str = "abcd", **options: Any) -> None:
    for name, prompt in zip(names, PROMPTS, strict=False):
        engine.add_request(prompt, greedy(8), request_id=name, **options)


# --- abort --------------------------------------------------------------------------------------


@every_milestone
@pytest.mark.parametrize("victim", "abcd")
def test_abort_of_a_waiting_and_a_running_request(package, victim):
    """With two places, a and b run from the first step on; c and d wait."""
    engine = make_engine(package, max_num_seqs=2)
    add_all(engine)
    for _ in range(3):
        engine.step()
    output = engine.abort(victim)
    expected = dict(zip("abcd", EXPECTED, strict=True))
    tokens = expected.pop(victim)[: 3 if victim in "ab" else 0]
    assert (output.finish_reason, output.finished, output.token_ids) == ("abort", True, tokens)
    assert output.metrics.finish_time is not None
    assert engine.abort(victim) is None, "it is gone"
    assert engine.abort("never heard of") is None
    final = run_to_end(engine)
    assert {name: out.token_ids for name, out in final.items()} == expected
    assert engine.stats()["finished"] == 4
    assert_empty(engine)


# --- tokens of which no text can be made --------------------------------------------------------


class HalfTokenizer:
    """Knows all tokens but one, and raises where it is asked for the text of that one.

    Args:
        knows: it says that it has the token, and raises when it decodes it.
    """

    def __init__(self, unknown: int, knows: bool) -> None:
        self._tokenizer, self._unknown, self._knows = word_tokenizer(), unknown, knows

    def convert_ids_to_tokens(self, token_id: int) -> str:
        if token_id == self._unknown and not self._knows:
            raise IndexError("piece id is out of range")
        return self._tokenizer.convert_ids_to_tokens(token_id)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        if self._unknown in token_ids:
            raise IndexError("piece id is out of range")
        return self._tokenizer.decode(token_ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@every_milestone
@pytest.mark.parametrize("knows", [False, True], ids=["no such id", "decode raises"])
def test_a_token_of_which_no_text_can_be_made_ends_its_own_request_at_most(package, knows):
    unknown = EXPECTED[1][4]
    engine = make_engine(package, tokenizer=HalfTokenizer(unknown, knows), trace="console")
    add_all(engine)
    final = run_to_end(engine)
    for name, expected in zip("abcd", EXPECTED, strict=True):
        is_bad = knows and unknown in expected
        known = expected[: expected.index(unknown)] if is_bad else expected
        assert final[name].finish_reason == ("error" if is_bad else "length")
        assert final[name].token_ids == known
        assert final[name].text == as_text([token for token in known if token != unknown])
        assert len(final[name].metrics.token_times) == len(known)
    assert_empty(engine)


# --- steps that raise ---------------------------------------------------------------------------


@every_milestone
@pytest.mark.parametrize(("method", "failing"), [("launch", 1), ("launch", 8), ("wait", 4)])
def test_a_raising_step_ends_its_requests_and_waiting_ones_get_their_tokens(
    package, method, failing, monkeypatch
):
    error = RuntimeError("out of memory")
    engine = make_engine(package, max_num_seqs=2, trace="memory")
    break_at_call(monkeypatch, engine.runner, method, {failing}, error)
    add_all(engine)
    for _ in range(failing - 1):
        engine.step()
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        engine.step()
    assert raised.value is error
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv"]["used"]) == (0, 2, 0)

    final = run_to_end(engine)
    for number, name in enumerate("ab"):
        assert final[name].finish_reason == "error"
        assert final[name].token_ids == EXPECTED[number][: failing - 1]
    for number, name in enumerate("cd", start=2):
        assert final[name].finish_reason == "length"
        assert final[name].token_ids == EXPECTED[number]
    record = engine.tracer.records[failing - 1]
    assert [ended["reason"] for ended in record.finished] == ["error", "error"]
    assert [row.sampled_token for row in record.batch] == [None, None]
    assert_empty(engine)


@pytest.mark.parametrize(
    ("package", "fields"),
    [(m3_paged, {}), (m4_prefix_chunked, {}), (m4_prefix_chunked, {"max_num_batched_tokens": 4})],
    ids=["M3", "M4", "M4 in chunks"],
)
def test_a_prompt_that_fails_ends_all_its_completions(package, fields, monkeypatch):
    """Only its first completion has a row in the first chunk; the others are held back."""
    engine = make_engine(package, **fields)
    break_at_call(monkeypatch, engine.runner, "launch", {1}, RuntimeError("out of memory"))
    for name, prompt in zip("ab", PROMPTS, strict=False):
        engine.add_request(prompt, greedy(8, n=3), request_id=name)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    final = run_to_end(engine)
    assert [each.finish_reason for each in final["a"].outputs] == ["error"] * 3
    assert [each.token_ids for each in final["a"].outputs] == [[]] * 3
    assert [each.token_ids for each in final["b"].outputs] == [EXPECTED[1]] * 3
    assert_empty(engine)


@every_milestone
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_a_generate_that_raises_leaves_only_the_waiting_requests_of_others(
    package, error, monkeypatch
):
    engine = make_engine(package, max_num_seqs=2)
    break_at_call(monkeypatch, engine.runner, "launch", {3}, error)
    stream = engine.stream(PROMPTS[:2], greedy(8))
    engine.add_request(PROMPTS[3], greedy(8), request_id="later")
    with pytest.raises(type(error)):
        list(stream)
    final = run_to_end(engine)
    assert {name: output.token_ids for name, output in final.items()} == {"later": EXPECTED[3]}
    assert_empty(engine)
    outputs = engine.generate(PROMPTS, greedy(8))
    assert [output.token_ids for output in outputs] == EXPECTED


@every_milestone
@pytest.mark.parametrize("is_in_prompt", [True, False])
def test_logits_that_are_no_numbers_end_their_request_and_no_other(
    package, is_in_prompt, monkeypatch
):
    engine = make_engine(package, trace="memory")
    head, method = engine.model.lm_head, "forward"
    if package is m5_kernels:
        head, method = engine.decoder, "logits"
    forward, calls = getattr(head, method), itertools.count()
    broken_call = 0 if is_in_prompt else 3

    def breaking(*given: Any) -> Any:
        logits = forward(*given)
        if next(calls) == broken_call:
            logits.flatten(0, -2)[0] = float("nan")
        return logits

    monkeypatch.setattr(head, method, breaking)
    outputs = engine.generate(PROMPTS, greedy(8))
    assert [output.finish_reason for output in outputs] == ["error"] + ["length"] * 3
    assert outputs[0].token_ids == EXPECTED[0][:broken_call]
    assert sum(row.sampled_token == -1 for r in engine.tracer.records for row in r.batch) == 0
    assert [output.token_ids for output in outputs[1:]] == EXPECTED[1:]
    assert_empty(engine)
    (again,) = engine.generate(PROMPTS[0], greedy(8))
    assert again.token_ids == EXPECTED[0]


@every_milestone
def test_kv_that_is_no_number_does_not_reach_those_who_come_after(package, monkeypatch):
    """Masked positions still enter attention, times zero - and zero times NaN is NaN."""
    engine = make_engine(package, max_num_seqs=2, max_model_len=32)
    layer = engine.model.model.layers[0].self_attn
    if package is m5_kernels:
        weights = engine.decoder.layers[0].qkv
        before = weights.clone()
        weights[-1] = float("nan")
    else:
        forward = layer.v_proj.forward
        monkeypatch.setattr(layer.v_proj, "forward", lambda x: forward(x) * float("nan"))
    broken = engine.generate(random_prompts([25, 20]), greedy(2))
    assert [(output.finish_reason, output.token_ids) for output in broken] == [("error", [])] * 2
    monkeypatch.undo()
    if package is m5_kernels:
        weights.copy_(before)
    outputs = engine.generate(PROMPTS, greedy(8))
    assert [output.token_ids for output in outputs] == EXPECTED
    assert_empty(engine)
