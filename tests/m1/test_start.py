"""What an engine decides when it is built, and that warming up leaves no trace of itself."""

from __future__ import annotations

from typing import Any

import pytest

import m4_prefix_chunked
import m5_kernels
from engine_helpers import assert_empty, every_milestone, greedy, make_engine, random_prompts
from m1_single import SamplingParams
from m3_paged import kv_memory

with_chunks = pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels])


# --- max_model_len ------------------------------------------------------------------------------


@every_milestone
def test_left_out_it_is_the_models_own_where_prompts_are_computed_in_chunks(package: Any) -> None:
    engine = package.LLMEngine("tiny-llama", max_num_batched_tokens=64)
    assert engine.max_model_len == (64 if package.__name__ < "m4" else 1024)
    (prompt,) = random_prompts([engine.max_model_len - 2])
    (output,) = engine.generate(prompt, greedy(9))
    assert (len(output.token_ids), output.finish_reason) == (2, "length")
    assert_empty(engine)


@with_chunks
def test_without_chunks_a_step_bounds_it(package: Any) -> None:
    fields = {"max_num_batched_tokens": 64, "enable_chunked_prefill": False}
    assert package.LLMEngine("tiny-llama", **fields).max_model_len == 64


@with_chunks
def test_left_out_it_is_no_more_than_kv_memory_holds(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "CPU_KV_BYTES", 512 * 100)  # 512 bytes a token: six blocks
    left_out = package.LLMEngine("tiny-llama")
    assert (left_out.max_model_len, left_out.scheduler.num_blocks) == (96, 6)
    asked_for = package.LLMEngine("tiny-llama", max_model_len=200)
    assert (asked_for.max_model_len, asked_for.scheduler.num_blocks) == (200, 13)
    for engine in (left_out, asked_for):
        (prompt,) = random_prompts([engine.max_model_len - 1])
        assert len(engine.generate(prompt, greedy(9))[0].token_ids) == 1


# --- warm_up ------------------------------------------------------------------------------------


@every_milestone
@pytest.mark.parametrize("max_model_len", [2, 64])
def test_warming_up_changes_no_figure_no_trace_and_no_seed(
    package: Any, max_model_len: int
) -> None:
    fields = {"max_num_seqs": 20, "max_model_len": max_model_len, "trace": "memory"}
    warm, cold = (make_engine(package, **fields) for _ in range(2))
    warm.warm_up()
    assert warm.stats() == cold.stats()
    assert warm.tracer.records == []
    assert warm.scheduler.drain_events() == []
    lengths = [each for each in (20, 1, 7) if each < max_model_len]
    work = random_prompts(lengths), SamplingParams(max_tokens=6)  # seeded by their numbers
    outputs, others = warm.generate(*work), cold.generate(*work)
    assert outputs[0].request_id == "r0"
    assert [output.token_ids for output in outputs] == [other.token_ids for other in others]
    assert warm.stats() == cold.stats()
    assert warm.tracer.records[0].step == 0


@every_milestone
def test_warming_up_is_for_the_start(package: Any) -> None:
    engine = make_engine(package)
    engine.add_request([5, 6, 7], greedy(2))
    with pytest.raises(RuntimeError, match="there are 1 requests"):
        engine.warm_up()
