"""The prefix cache as a user of the engine meets it: salts, reset, and requests that go wrong."""

from __future__ import annotations

from typing import Any

import pytest

import m4_prefix_chunked
from helpers.engines import (
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
)
from milestone_llm.models.tiny_models import build_tiny_model

SYSTEM, TAIL, OTHER = random_prompts([16, 9, 18], seed=21)


def cached_engine(**fields: Any) -> Any:
    """Blocks of 4, so that the system prompt is four of them."""
    return make_engine(
        m4_prefix_chunked, **{"max_model_len": 48, "block_size": 4, "trace": "memory", **fields}
    )


def check(engine: Any, prompt: list[int], num_cached: int, max_tokens: int = 4, **params: Any):
    """Generate, and compare tokens with Hugging Face and what was saved with what is expected."""
    (output,) = engine.generate(prompt, greedy(max_tokens, **params))
    assert output.token_ids == hf_greedy("llama", prompt, max_tokens)
    assert output.metrics.num_cached_tokens == num_cached


def test_another_cache_salt_never_hits():
    """Who can tell a hit by its time to first token learns nothing of another tenant's prompts."""
    engine = cached_engine()
    for salt, num_cached in [("", 0), ("x", 0), ("y", 0), ("x", 24), ("", 24)]:
        check(engine, SYSTEM + TAIL, num_cached, cache_salt=salt)


@pytest.mark.parametrize("b_ends", [run_to_end, lambda engine: engine.abort("b")])
def test_reset_is_refused_while_kv_is_swapped_out(b_ends):
    """No block is in use on the device; but b will go on with the KV that it has on the host."""
    engine = cached_engine(max_model_len=12, kv_cache_tokens=12, preemption="swap")
    engine.add_request(SYSTEM[:4], greedy(8), "a")
    engine.add_request(OTHER[:3], greedy(8), "b")
    while not engine.tracer.records or not engine.tracer.records[-1].swapped:
        engine.step()
    engine.abort("a")
    assert engine.stats()["kv"]["used"] == 0
    assert engine.reset_prefix_cache() is False
    b_ends(engine)
    assert engine.reset_prefix_cache() is True


def test_after_reset_new_weights_are_used():
    """Without it, the old weights' KV would be found."""
    model = build_tiny_model("llama").double()
    engine = make_engine(m4_prefix_chunked, model, max_model_len=48, block_size=4)
    (before,) = engine.generate(SYSTEM + TAIL, greedy(4))
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(-1)
    assert engine.reset_prefix_cache()
    (after,) = engine.generate(SYSTEM + TAIL, greedy(4))
    fresh = make_engine(m4_prefix_chunked, model, max_model_len=48, block_size=4)
    assert after.token_ids == fresh.generate(SYSTEM + TAIL, greedy(4))[0].token_ids
    assert after.token_ids != before.token_ids


def test_cached_kv_that_was_no_number_is_not_found_again(monkeypatch):
    """The first chunks show nothing, for they sample nothing; their blocks are cached by then."""
    (prompt,) = random_prompts([40])
    engine = cached_engine(max_num_batched_tokens=16)
    check(engine, SYSTEM + TAIL, 0)
    values = engine.model.model.layers[0].self_attn.v_proj
    forward = values.forward
    monkeypatch.setattr(values, "forward", lambda hidden: forward(hidden) * float("nan"))
    (output,) = engine.generate([prompt], greedy(4))
    assert (output.token_ids, output.finish_reason) == ([], "error")
    monkeypatch.undo()
    check(engine, prompt, 0)
    check(engine, SYSTEM + TAIL, 24)
