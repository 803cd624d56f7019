"""The bench of M2, and Hugging Face's own continuous batching as a baseline."""

from __future__ import annotations

from typing import Any

from m2_batching import LLMEngine
from m2_batching.bench import main
from milestone_llm.lab.bench.hf_baselines import hf_continuous
from milestone_llm.lab.bench.measure import check_work
from milestone_llm.lab.bench.workloads import mixed
from milestone_llm.models.tiny_models import build_tiny_model

pytest_plugins = ["bench_helpers"]
SMALL = ["--model", "tiny-qwen3", "--num-requests", "4"]
SMALL += ["--input-len", "3", "12", "--output-len", "2", "7"]


def test_no_position_is_padding_and_nothing_else_is_lost(run_bench: Any) -> None:
    out, _, data, _ = run_bench(main, *SMALL, "--baseline", "continuous")
    assert data["same_tokens"] == {"HF continuous": 4}
    assert data["contestants"]["m2_batching"]["median"]["useful_share"] == 1
    assert data["kv_unit"] == "region"
    assert "were padding" not in out


def test_one_request_alone(run_bench: Any) -> None:
    run = run_bench(main, *SMALL, "--num-requests", "1", "--baseline", "one-by-one")
    assert "1 request," in run.out
    assert run.markdown.endswith("- token for token the same as HF one by one: 1 of 1 output\n")


def test_hf_continuous_batching_does_each_requests_own_work() -> None:
    model = build_tiny_model("llama")
    model.generation_config.eos_token_id = list(range(100))  # half of all tokens end, if asked
    items = mixed(199, 0, num_requests=5, input_len=(2, 9), output_len=(1, 8))
    engine = LLMEngine(model, max_num_seqs=3, max_model_len=32)  # fewer rows than requests
    counts: list[int] = []
    result = hf_continuous(engine, items, counts.append)
    check_work("HF", items, result)
    lengths = [item.params.max_tokens for item in items]
    assert sum(counts) == sum(lengths)
    assert list(map(len, result.token_times)) == lengths
    assert all(times == sorted(times) and times[0] > 0 for times in result.token_times)
    assert model.config._attn_implementation == "sdpa"
