"""Tensor parallelism: several processes give the tokens of one, and none waits for ever."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import m5_kernels
from helpers import rank_programs
from helpers.forked import process
from helpers.servers import save_tiny_model
from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.extras.tensor_parallel.rank_shard import RankShard
from m5_kernels.extras.tensor_parallel.ranks import _meeting_point
from milestone_llm.models.tiny_models import build_tiny_model

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

STORM = os.environ.get("STORM") == "1"
PATIENCE_S = 1800 if STORM else 240
NUM_STEPS = 10_000 if STORM else 100

CASES: dict[str, Any] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}, {}),
    "qwen3, tied": (
        "qwen3",
        {"tie_word_embeddings": True, "vocab_size": 200},
        {"preemption": "swap"},
    ),
    "mistral, a window in groups": ("mistral", {"sliding_window": 9}, {"preemption": "swap"}),
    "llama in eight bits": ("llama", {"mlp_bias": True}, {"quantization": "int8"}),
}


def held_port() -> tuple[socket.socket, int]:
    """A port that the system gives to nobody else while the socket is open; rank 0 shares it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held, held.getsockname()[1]


class Started:
    """Processes of one program, and the folder with what they wrote."""

    def __init__(self, program: str, size: int, folder: Path, **options: Any) -> None:
        self.held, port = held_port()
        self.folder, self.size = folder, size
        folder.mkdir(exist_ok=True)
        self.processes = [
            process(
                rank_programs.start, program, rank, size, port, str(folder), options, daemon=True
            )
            for rank in range(size)
        ]
        for each in self.processes:
            each.start()

    def wait(self) -> list[int | None]:
        """Exit codes of all; whoever takes too long is killed."""
        for each in self.processes:
            each.join(PATIENCE_S)
        codes = [each.exitcode for each in self.processes]
        for each in self.processes:
            each.kill()
        self.held.close()
        return codes

    def results(self) -> list[Any]:
        """What each rank found."""
        codes = self.wait()
        logs = "\n".join(self.log(rank) for rank in range(self.size))
        assert codes == [0] * self.size, f"exit codes {codes}\n{logs}"
        return [
            json.loads((self.folder / f"result{rank}.json").read_text())
            for rank in range(self.size)
        ]

    def log(self, rank: int) -> str:
        return (self.folder / f"log{rank}").read_text()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return Started("families", 2, tmp_path_factory.mktemp("families"), cases=CASES).results()


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_rank(families, case):
    alone = families[0][f"{case} alone"]
    for found in families:
        assert found[case]["tokens"] == alone["tokens"]
        assert found[case]["used"] == 0
        assert found[case]["has_groups"] == ("groups" in case)


def test_each_rank_has_its_own_part(families):
    whole = families[0]["llama alone"]
    for found in families:
        part = found["llama"]
        assert part["mlp_rows"] * 2 == whole["mlp_rows"]
        assert part["kv_bytes"] * 2 == whole["kv_bytes"]
        assert found["llama, one KV head"]["kv_bytes"] == part["kv_bytes"]
    parts = [found["llama"]["first_neuron"] for found in families]
    assert parts[0] != parts[1]


@pytest.fixture(scope="module")
def two_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """What two programs found that ran side by side, each with its own ranks."""
    folder = tmp_path_factory.mktemp("two")
    both = [
        Started("random_steps", 2, folder / "a", num_steps=NUM_STEPS, seed=11),
        Started("only_rank_0_is_asked", 2, folder / "b"),
    ]
    return both[0].results(), both[1].results()


def test_ranks_plan_and_sample_the_same_under_random_traffic(two_at_a_time):
    found, _ = two_at_a_time
    alone = json.loads(json.dumps(rank_programs.random_steps(0, 1, NUM_STEPS, seed=11)))
    assert found[0] == found[1] == alone
    assert alone["used"] == 0
    assert min(alone[name] for name in ("steps", "preemptions", "hits", "aborted")) > 0
    assert alone["guesses"] > 20


def test_a_rank_reads_no_more_of_a_folder_than_its_part(tmp_path):
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    found = Started("folder_part", 2, tmp_path, model=str(tmp_path / "model")).results()
    matrices = sum(
        parameter.numel() for parameter in model.model.layers.parameters() if parameter.dim() > 1
    )
    norms = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 1)
    for each in found:
        assert each["together"] == each["alone"]
        assert each["layer_elements"] == matrices / 2 + norms
        assert each["module_elements"] == 0


def test_ranks_follow_where_only_rank_0_is_asked(two_at_a_time):
    _, (result, follower) = two_at_a_time
    assert result["found"] == result["expected"]
    assert follower == "followed to the end"


@pytest.mark.slow
def test_a_rule_holds_on_all_ranks_where_only_rank_0_is_asked(tmp_path):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    folder = save_tiny_model(tmp_path / "model")
    result, compiled = Started("rules", 2, tmp_path / "ranks", model=str(folder)).results()
    assert result["found"] == result["expected"]
    # each once, and not in the thread of rank 1's steps
    assert sorted(compiled) == sorted([key, False] for key in result["rules"])


def test_ranks_that_are_asked_for_different_things_end_with_a_message(tmp_path):
    started = Started("different_calls", 2, tmp_path)
    codes = started.wait()
    assert codes == [1, 1]
    assert "make the same calls on all ranks, or only on rank 0" in started.log(1)
    assert "rank 1 of 2 has ended in the middle of the work" in started.log(0)


def test_a_rank_that_dies_takes_the_others_down(tmp_path):
    started = Started("dies_in_a_step", 2, tmp_path)
    codes = started.wait()
    assert codes[1] == -9
    assert codes[0] == 1, started.log(0)
    assert not list(tmp_path.glob("result*"))


# --- without processes ----------------------------------------------------------------------------


def config(**fields: Any) -> DecoderConfig:
    return DecoderConfig.from_hf(build_tiny_model("llama", **fields).config)


def test_what_does_not_divide_is_refused_with_the_numbers():
    smollm2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    smollm2 |= {"intermediate_size": 1536, "head_dim": 64}
    with pytest.raises(ValueError, match=r"=2 does not divide the 9 query heads .* possible: 1, 3"):
        RankShard(0, 2).own_config(config(**smollm2))
    cut = RankShard(0, 3).own_config(config(**smollm2))
    assert (cut.num_q_heads, cut.num_kv_heads, cut.intermediate_size) == (3, 1, 512)
    with pytest.raises(ValueError, match="intermediate_size"):
        RankShard(0, 2).own_config(config(intermediate_size=129))


def test_the_program_has_to_be_started_once_a_gpu():
    with pytest.raises(ValueError, match="torchrun --standalone --nproc-per-node 2"):
        m5_kernels.LLMEngine("tiny-llama", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        m5_kernels.LLMEngine("tiny-llama", tensor_parallel_size=0)


# --- on GPUs --------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_gpus_give_the_tokens_of_one(tmp_path, enforce_eager):
    """Graphs that hold a communicator are captured and dropped, engine after engine."""
    cases = {
        name: (family, changes, {**fields, "enforce_eager": enforce_eager})
        for name, (family, changes, fields) in CASES.items()
    }
    found = Started("families", 2, tmp_path, cases=cases, device="cuda").results()
    for case in CASES:
        for each in found:
            assert each[case]["tokens"] == found[0][f"{case} alone"]["tokens"], case


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_guess_together(tmp_path):
    """In fp32, three guesses a row."""
    for found in Started("guesses", 2, tmp_path, device="cuda").results():
        assert found["together"] == found["alone"]
        assert found["accepted"] > 10


@pytest.mark.gpu
@needs_two_gpus
def test_the_fused_all_reduce_agrees_with_its_specification(tmp_path):
    assert max(Started("fused_kernel", 2, tmp_path).results()) < 0.05


def test_the_store_listens_at_the_masters_address_alone(monkeypatch):
    held, port = held_port()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    found = _meeting_point()
    found["store"].set("key", "value")
    ends = [each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"]
    assert {end.ip for end in ends if end.port == port} == {"127.0.0.1"}
    held.close()


def test_under_torchrun_the_store_is_torchruns(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert _meeting_point() == {}
