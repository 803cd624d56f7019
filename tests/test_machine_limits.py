"""What the machine does not have is refused at the start, before any of it is taken."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import m2_batching
import m3_paged
import m4_prefix_chunked
import m5_kernels
from helpers.engines import every_milestone, tiny_model
from m3_paged import kv_memory
from milestone_llm.cli import model_libraries
from milestone_llm.core.errors import InputError
from milestone_llm.models import machine

PAGED = [m3_paged, m4_prefix_chunked, m5_kernels]
SMALL: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4}
SWAP = {**SMALL, "preemption": "swap", "swap_space_tokens": 100_000}
TOO_MUCH: list[tuple[Any, dict[str, Any], str]] = [  # a token takes 1,024 bytes
    (m2_batching, {"max_num_seqs": 1000, "max_model_len": 512}, "max_num_seqs=1000 .*=512 tokens"),
    *((each, {**SMALL, "kv_cache_tokens": 100_000}, "6250 blocks of .*=16") for each in PAGED),
    *((each, {**SMALL, "block_size": 100_000}, "4 blocks of block_size=100000") for each in PAGED),
    *((each, SWAP, "swap_space_tokens=100000 tokens") for each in PAGED),
    (m5_kernels, {"max_num_seqs": 40_000, "max_model_len": 512}, "max_num_seqs=40000 requests"),
]


@pytest.mark.parametrize(
    ("package", "fields", "what"),
    TOO_MUCH,
    ids=[f"{package.__name__[:2]}-{next(reversed(fields))}" for package, fields, _ in TOO_MUCH],
)
def test_more_than_memory_is_refused_before_it_is_taken(package, fields, what, monkeypatch):
    def is_too_late(*arguments: object) -> None:
        raise AssertionError("books are made already")

    monkeypatch.setattr(machine, "host_memory", lambda: 32 * 2**20)
    monkeypatch.setattr(f"{package.__name__}.engine.Scheduler", is_too_late)
    with pytest.raises(InputError, match=rf"{what}.* GiB, and this machine has .* GiB: .*lower"):
        package.LLMEngine(tiny_model(), **fields)


def test_the_books_of_blocks_count_too(monkeypatch):
    """On a GPU, blocks lie in its memory and what is known of them in the host's."""
    monkeypatch.setattr(machine, "host_memory", lambda: 32 * 2**20)
    monkeypatch.setattr(kv_memory.KVShape, "bytes_per_token", 1)
    with pytest.raises(InputError, match=r"the books of 1000000 blocks .* raise block_size"):
        m3_paged.LLMEngine(tiny_model(), **SMALL, kv_cache_tokens=10**6, block_size=1)


@every_milestone
def test_what_nobody_asked_for_fits_a_small_machine(package, monkeypatch):
    for module in (machine, kv_memory):
        monkeypatch.setattr(module, "host_memory", lambda: 2**20)
    extra = {"preemption": "swap"} if package in PAGED else {}
    engine = package.LLMEngine(tiny_model(), max_num_seqs=1, **extra)
    if package in PAGED:
        assert engine.stats()["kv"]["total"] * 16 * 1024 <= 2**19
        assert engine.config.swap_space_tokens * 1024 <= 2**18


@every_milestone
def test_a_request_has_a_prompt_and_an_output(package):
    assert package.LLMEngine(tiny_model(), max_model_len=2).generate([[5]])[0].token_ids
    others = {"max_num_batched_tokens": 1, "max_num_seqs": 1}  # of whole prompts
    others = {"kv_cache_tokens": 1, "block_size": 1} if package in PAGED else others
    with pytest.raises(InputError, match="the other limits leave 1 tokens"):
        package.LLMEngine(tiny_model(), **others)


def test_there_are_no_more_threads_than_cores(monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    try:
        for asked, num_threads in ((1, 1), (2, 2), (10**6, 2)):
            with model_libraries(asked):
                assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert re.findall(r"--threads \d+: there are 2 cores", capsys.readouterr().err) == [
        "--threads 1000000: there are 2 cores"
    ]


def test_a_containers_limit_is_found_in_both_kinds_of_control_groups(tmp_path):
    inner = tmp_path / "service"
    (tmp_path / "memory" / "job").mkdir(parents=True)
    inner.mkdir()
    (tmp_path / "memory.max").write_text("4096\n")
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("2048\n")
    groups = "9:pids:/other\n4:cpu,memory:/job\n0::/service\n"
    assert sorted(machine._container_limits(groups, str(tmp_path))) == [2048, 4096]
    assert 0 < machine.host_memory() < 2**60
