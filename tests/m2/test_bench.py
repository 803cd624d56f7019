"""What M2 adds to the bench: Hugging Face's own continuous batching."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m2_batching import LLMEngine
from m2_batching.bench import BASELINES, hf_continuous
from milestone_llm.bench.command import main
from milestone_llm.bench.measure import check_work
from milestone_llm.bench.workloads import mixed
from milestone_llm.models.tiny_models import build_tiny_model

SMALL = ["--model", "tiny-qwen3", "--num-requests", "4"]
SMALL += ["--input-len", "3", "12", "--output-len", "2", "7"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_all_baselines_give_the_same_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    arguments = [*SMALL, "--baseline", "hf", "--json", str(path)]
    assert main(LLMEngine, arguments, baselines=BASELINES) == 0
    data = json.loads(path.read_text())
    names = ["HF one by one", "HF static batch", "HF continuous"]
    assert list(data["contestants"]) == ["m2_batching", *names]
    assert data["same_tokens"] == dict.fromkeys(names, 4)
    assert data["contestants"]["m2_batching"]["median"]["useful_share"] == 1
    assert data["kv_unit"] == "slot"
    out = capsys.readouterr().out
    assert "padding" not in out
    assert all(len(line) <= 80 for line in out.splitlines() if "written" not in line)


def test_one_request_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--num-requests", "1", "--baseline", "one-by-one"]
    assert main(LLMEngine, arguments, baselines=BASELINES) == 0
    assert "1 of 1 outputs are token for token those of HF one by one" in capsys.readouterr().out


def test_hf_continuous_batching_does_each_requests_own_work() -> None:
    model = build_tiny_model("llama")
    model.generation_config.eos_token_id = list(range(100))  # half of all tokens end, if asked
    items = mixed(199, 0, num_requests=5, input_len=(2, 9), output_len=(1, 8))
    engine = LLMEngine(model, max_num_seqs=3, max_model_len=32)  # fewer rows than requests
    counts: list[int] = []
    result = hf_continuous(engine, items).run(items, counts.append)
    check_work("HF", items, result)
    lengths = [item.params.max_tokens for item in items]
    assert sum(counts) == sum(lengths)
    assert list(map(len, result.token_times)) == lengths
    assert all(times == sorted(times) and times[0] > 0 for times in result.token_times)
    assert model.config._attn_implementation == "sdpa"
