"""Steps padded to buckets: what is beyond the step reads nothing, writes nothing, changes nothing.

Here a graph is computed anew at each replay, so that its padding is tested without a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import m4_prefix_chunked
import m5_kernels
from helpers.engines import (
    break_at_call,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    tiny_model,
)
from helpers.m5_models import RecomputedGraphs, with_recomputed_graphs, workload
from m1_single import SamplingParams
from m5_kernels.decoder.hf_decoder import HFDecoder
from m5_kernels.extras.tensor_parallel.rank_group import RankGroup
from m5_kernels.group import Group
from m5_kernels.sampler import SamplingFeatures
from m5_kernels.step_graphs import MAX_CHUNKS, MAX_TOKENS, Buckets, StepGraphs, StepShape
from milestone_llm.lab.families import build_small_model
from milestone_llm.models.tiny_models import TINY_FAMILIES, build_tiny_model

FIELDS: dict[str, Any] = {"max_num_seqs": 5, "max_model_len": 112, "max_num_batched_tokens": 70}
FIELDS |= {"kv_cache_tokens": 448, "long_prefill_token_threshold": 24}


def tokens_of(engine: Any, work: Any) -> list[Any]:
    return [each.token_ids for output in engine.generate(*work) for each in output.outputs]


def padded_engine(graphs: Callable[..., Any] = RecomputedGraphs, **fields: Any) -> Any:
    return make_engine(
        m5_kernels,
        tiny_model(),
        adapt_backend=lambda chosen: with_recomputed_graphs(chosen, graphs),
        **FIELDS,
        **fields,
    )


@pytest.mark.parametrize("seed", range(3))
def test_padded_steps_give_the_tokens_of_m4(seed, poisoned):
    engine = padded_engine(async_scheduling=True)
    m4 = make_engine(m4_prefix_chunked, tiny_model(), **FIELDS)
    assert tokens_of(engine, workload(seed)) == tokens_of(m4, workload(seed))
    assert StepShape(64, 5, 5, MAX_CHUNKS) in engine.runner.graphs.replayed
    assert StepShape(5, 5, 5, 0) in engine.runner.graphs.replayed


@pytest.mark.parametrize("is_warm", [True, False])
def test_steps_whose_graphs_memory_does_not_hold_are_launched_as_they_are(is_warm, caplog):
    engine = padded_engine(partial(RecomputedGraphs, capacity=2), async_scheduling=True)
    if is_warm:
        engine.runner.capture_graphs()
    m4 = make_engine(m4_prefix_chunked, tiny_model(), **FIELDS)
    work = random_prompts([60, 5, 30, 9, 20, 7]), greedy(12)
    assert tokens_of(engine, work) == tokens_of(m4, work)
    (line,) = caplog.messages
    assert ("steps, of 1, 2, 4 tokens" in line) == is_warm
    assert "Lower gpu_memory_utilization" in line
    graphs = engine.runner.graphs
    assert graphs.replayed  # by those that are there
    assert len(graphs.tried) > 2
    assert len(graphs.tried) == len(set(graphs.tried))  # none is tried twice


def test_a_step_that_failed_leaves_nothing_in_the_padding_of_later_steps(monkeypatch):
    engine = padded_engine(async_scheduling=False)
    break_at_call(monkeypatch, engine.runner, "launch", {3}, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        engine.generate(random_prompts([5] * 5), greedy(12))
    prompts = random_prompts([24] * 3, seed=1)  # with the blocks that the five had
    outputs = engine.generate(prompts, greedy(12))
    assert [each.token_ids for each in outputs] == [hf_greedy("llama", p, 12) for p in prompts]


def test_a_step_for_which_there_is_no_memory_leaves_the_rows_as_they_were():
    def compute(shape: StepShape, needs: SamplingFeatures) -> torch.Tensor:
        assert torch.equal(step_rows, torch.tensor([-1, -1, -1]))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    step_rows = torch.tensor([2, 0, 1])
    graphs = StepGraphs(step_rows, compute, Group())
    graphs.compute_nothing(Buckets(3, 70).largest_step, SamplingFeatures())
    assert torch.equal(step_rows, torch.tensor([2, 0, 1]))


def test_a_rank_keeps_the_graphs_that_all_ranks_could_capture(monkeypatch):
    """Where one replays a sum over all ranks, none may launch its part of it kernel by kernel."""

    def capture(bucket: StepShape, needs: SamplingFeatures) -> StepShape:
        if bucket.num_tokens == 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return bucket

    elsewhere = iter([1, 1, 0, 1, 1])
    group = part_of(lambda number: min(number, next(elsewhere)))
    graphs = StepGraphs(torch.full((8,), -1), lambda shape, needs: torch.empty(0), group)
    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.capture(Buckets(8, 70).all(), SamplingFeatures())
    sizes = {bucket.num_tokens: kept for (bucket, _), kept in graphs._graphs.items()}
    assert [size for size, kept in sizes.items() if kept is None] == [8, 4]
    assert next(elsewhere, None) is None  # each was agreed on


def test_a_rank_without_memory_for_the_largest_step_ends():
    """Others wait for its part of a sum."""

    def compute(shape: StepShape, needs: SamplingFeatures) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    graphs = StepGraphs(torch.tensor([0]), compute, part_of(int))
    with pytest.raises(torch.OutOfMemoryError):
        graphs.compute_nothing(Buckets(1, 70).largest_step, SamplingFeatures())


def test_what_else_a_capture_raises_is_no_want_of_memory(monkeypatch):
    def capture(bucket: StepShape, needs: SamplingFeatures) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    graphs = StepGraphs(torch.full((3,), -1), lambda shape, needs: torch.empty(0), Group())
    monkeypatch.setattr(graphs, "_capture", capture)
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.capture(Buckets(3, 70).all(), SamplingFeatures())


def test_modules_that_no_graph_holds_are_launched_and_one_line_says_so(caplog):
    class Refusing(RecomputedGraphs):
        def _capture(self, bucket: StepShape, features: SamplingFeatures) -> Any:
            self.tried.append((bucket, features))
            raise RuntimeError("operation not permitted when stream is capturing")

    engine = make_engine(
        m5_kernels,
        tiny_model("gemma3"),
        async_scheduling=True,
        adapt_backend=lambda chosen: with_recomputed_graphs(
            replace(chosen, decoder=HFDecoder), partial(Refusing, must=False)
        ),
        **FIELDS,
    )
    assert engine.stats()["decoder"] == "Hugging Face's modules"
    caplog.clear()
    m4 = make_engine(m4_prefix_chunked, tiny_model("gemma3"), **FIELDS)
    assert tokens_of(engine, workload(1)) == tokens_of(m4, workload(1))
    assert len(engine.runner.graphs.tried) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Steps are launched kernel by kernel: no CUDA graph holds them "
        "(operation not permitted when stream is capturing)"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [None, "ngram"])
@pytest.mark.parametrize(
    ("family", "is_held"),
    [("gemma3", True), ("gpt2", True), ("cohere2", True), ("hunyuan_v1_moe", False)],
)
def test_on_a_gpu_modules_are_captured_where_they_can_be(family, is_held, speculation):
    is_tiny = family in TINY_FAMILIES
    model = (build_tiny_model if is_tiny else build_small_model)(family).float().cuda()
    engine = make_engine(
        m5_kernels,
        model,
        speculation=speculation,
        adapt_backend=lambda chosen: replace(chosen, decoder=HFDecoder),
        **FIELDS,
    )
    m4 = make_engine(m4_prefix_chunked, model, **FIELDS)
    assert tokens_of(engine, workload(2)) == tokens_of(m4, workload(2))
    runner = getattr(engine.runner, "runner", engine.runner)
    assert engine.decoder.can_be_captured == is_held == (runner.graphs is not None)
    assert not is_held or not runner.graphs.has_given_up


@pytest.mark.gpu
def test_graphs_take_no_memory_from_steps_without_one(caplog):
    """What is left of the GPU holds some graphs; the largest step finds its memory after them."""
    fields: dict[str, Any] = {"max_num_seqs": 20, "max_model_len": 1024, "dtype": "bfloat16"}
    fields |= {"max_num_batched_tokens": 8192, "kv_cache_tokens": 16384}
    prompts, params = random_prompts([1000] * 8 + [30, 7]), SamplingParams(temperature=0)
    engine = m5_kernels.LLMEngine("tiny-llama", **fields)
    wanted = [output.token_ids for output in engine.generate(prompts, params)]
    engine.reset_prefix_cache()
    graphs = engine.runner.graphs
    graphs._graphs.clear()
    graphs.memory.captured.clear()
    graphs.memory.pool = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with engine.runner.on_device(), torch.inference_mode():
        graphs.compute_nothing(StepShape(8192, 20, 20, MAX_CHUNKS), SamplingFeatures())
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**23) / total)
    try:
        engine.warm_up()
        assert any(graphs._graphs.values())
        assert not all(graphs._graphs.values())
        assert len(caplog.messages) == 1
        assert [output.token_ids for output in engine.generate(prompts, params)] == wanted
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_graphs_that_become_garbage_break_no_capture():
    """A circle keeps an engine, and the collector would meet it while the next one captures."""

    def engine() -> Any:
        return m5_kernels.LLMEngine("tiny-llama", max_num_seqs=2, kv_cache_tokens=256)

    prompts, params = random_prompts([5, 9]), SamplingParams(temperature=0, max_tokens=4)
    garbage: list[Any] = [engine()]
    wanted = [output.token_ids for output in garbage[0].generate(prompts, params)]
    garbage.append(garbage)
    thresholds = gc.get_threshold()
    following = engine()
    del garbage
    gc.set_threshold(1, 1, 1)
    try:
        assert [output.token_ids for output in following.generate(prompts, params)] == wanted
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [
        ((1, 1, 1, 0), (1, 1, 1, 0)),
        ((100, 100, 100, 0), (112, 112, 112, 0)),
        ((20, 1, 0, 1), (64, 16, 16, MAX_CHUNKS)),
        ((140, 130, 129, 1), (256, 200, 200, MAX_CHUNKS)),  # as many tokens as rows, at least
        ((MAX_TOKENS, 17, 1, 16), (MAX_TOKENS, 64, 64, MAX_CHUNKS)),
        ((MAX_TOKENS + 1, 17, 1, 16), None),
        ((600, 17, 0, 17), None),
    ],
)
def test_the_smallest_bucket_that_holds_a_step(shape, bucket):
    expected = None if bucket is None else StepShape(*bucket)
    assert Buckets(200, 8192).bucket_for(StepShape(*shape)) == expected
    assert [each.num_tokens for each in Buckets(8, 100).all()] == [64, 8, 4, 2, 1], "no larger step"


def part_of(smallest: Callable[[int], int]) -> RankGroup:
    """One of several GPUs, which say what they can have; without their processes."""
    ranks: Any = SimpleNamespace(rank=0, size=2, device=None, shard=None, smallest=smallest)
    return RankGroup(ranks, 1)
