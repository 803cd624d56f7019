"""KV memory of a GPU: sized by a profiling step, pinned on the host, and right on a real one."""

from __future__ import annotations

import pytest
import torch

import m3_paged
import m4_prefix_chunked
from helpers.engines import greedy, random_prompts, tiny_model
from m1_single import SamplingParams
from m3_paged import EngineConfig
from m3_paged.kv_memory import _free_tokens_after_profiling, _largest_step
from milestone_llm.core.errors import InputError
from milestone_llm.models.tiny_models import build_tiny_model

BYTES_PER_TOKEN = 1024  # tiny llama in float64
MB = 2**20


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_num_batched_tokens": 64, "max_num_seqs": 8}, [32, 32]),
        ({"max_num_batched_tokens": 70, "max_num_seqs": 8}, [32, 32, 6]),
        ({"max_num_batched_tokens": 640, "max_num_seqs": 3}, [32, 32, 32]),
    ],
)
def test_the_profiled_step_is_the_largest_there_can_be(limits, expected):
    plan, num_blocks = _largest_step(EngineConfig(block_size=5, **limits), max_model_len=32)
    assert [row.num_new_tokens for row in plan.rows] == expected
    blocks = [block for row in plan.rows for block in row.blocks]
    assert sorted(blocks) == list(range(num_blocks))
    assert all(len(row.blocks) * 5 >= row.end for row in plan.rows)


def profile_on_fake_gpu(monkeypatch, *, free: int, total: int, peak: int, **fields) -> int:
    """The tokens found on a GPU that reports these bytes."""
    for name, value in {
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "memory_allocated": 100 * MB,
        "max_memory_allocated": peak,
        "mem_get_info": (free, total),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    config = EngineConfig(max_num_batched_tokens=64, **fields)
    plans = []
    num_tokens = _free_tokens_after_profiling(
        tiny_model(), config, 64, config.max_model_len or 16,
        run_once=lambda cache, plan: plans.append(plan),
    )  # fmt: skip
    assert [plan.num_tokens for plan in plans] == [64]
    return num_tokens


def test_kv_gets_what_model_and_activations_leave_of_its_share(monkeypatch):
    """1000 MB, 100 of them not to be used; 30 MB of activations; 800 MB free after the model."""
    own_cache = 64 * BYTES_PER_TOKEN
    gpu = {"total": 1000 * MB, "free": 800 * MB, "peak": 130 * MB + own_cache}
    num_tokens = profile_on_fake_gpu(monkeypatch, **gpu, gpu_memory_utilization=0.9)
    assert num_tokens == pytest.approx((800 - 30 - 100) * MB / BYTES_PER_TOKEN, abs=1)


def test_a_gpu_without_room_for_one_request_is_refused_with_the_numbers(monkeypatch):
    gpu = {"total": 1000 * MB, "free": 120 * MB, "peak": 130 * MB}
    message = r"=0.9 leaves room for 0 tokens .* fewer than one request of {} tokens"
    with pytest.raises(InputError, match=message.format(64)):
        profile_on_fake_gpu(monkeypatch, **gpu, max_model_len=64)
    with pytest.raises(InputError, match=message.format(16)):  # left out, one block would do
        profile_on_fake_gpu(monkeypatch, **gpu)


# --- on a real GPU ------------------------------------------------------------------------------


@pytest.fixture
def cuda_model():
    return build_tiny_model("llama").to("cuda")


@pytest.mark.gpu
def test_profiling_stays_within_its_share_of_the_gpu(cuda_model):
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    spare = 1024 * MB
    share = (total - free + spare) / total
    limits = {"max_model_len": 1024, "max_num_seqs": 4096, "max_num_batched_tokens": 8192}
    engine = m3_paged.LLMEngine(cuda_model, **limits, gpu_memory_utilization=share)
    kv = engine.stats()["kv"]
    num_bytes = kv["total"] * 16 * kv["bytes_per_token"]
    assert 0.3 * spare < num_bytes <= spare
    engine.generate(random_prompts([200] * 8), greedy(4))
    assert total - torch.cuda.mem_get_info()[0] <= total * share + 256 * MB  # the allocator rounds
    with pytest.raises(ValueError, match=r"=0.0001 leaves room for 0 tokens"):
        m3_paged.LLMEngine(cuda_model, max_model_len=256, gpu_memory_utilization=0.0001)


@pytest.mark.gpu
@pytest.mark.parametrize(("package", "times"), [(m3_paged, 1), (m4_prefix_chunked, 16)])
def test_no_more_is_taken_than_is_of_use(cuda_model, package, times):
    engine = package.LLMEngine(cuda_model, max_num_seqs=3, max_model_len=65)
    assert engine.stats()["kv"]["total"] == times * 3 * 5


@pytest.mark.gpu
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_gpu_gives_the_tokens_of_a_cpu_in_float32(cuda_model, preemption, temperature):
    prompts = random_prompts([1, 41, 5, 24, 2, 18])
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=10, ignore_eos=True, n=2)
        for seed in range(len(prompts))
    ]
    tokens = []
    for model in (build_tiny_model("llama"), cuda_model):
        engine = m3_paged.LLMEngine(
            model,
            max_num_seqs=6,
            max_model_len=64,
            kv_cache_tokens=96,
            preemption=preemption,
            check_invariants=True,
        )
        outputs = engine.generate(prompts, params)
        tokens.append([[c.token_ids for c in output.outputs] for output in outputs])
        assert engine.stats()["preemptions"] > 0
    assert tokens[0] == tokens[1]
    is_pinned = {tensor.is_pinned() for tensor in engine.runner.cache.host_keys}
    assert is_pinned == {preemption == "swap"}
