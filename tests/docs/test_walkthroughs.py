"""Every walkthrough runs, expects what the code does, and is the transcript in the docs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRANSCRIPTS = {
    "m1_single.walkthrough": "m1_walkthrough.txt",
    "m2_batching.walkthrough": "m2_walkthrough.txt",
    "m3_paged.walkthrough": "m3_walkthrough.txt",
    "m4_prefix_chunked.walkthrough": "m4_walkthrough.txt",
    "m5_kernels.walkthrough": "m5_walkthrough.txt",
    "docs.questions.walkthrough_flash_decode": "m5_flash_decode.txt",
}
every_walkthrough = pytest.mark.parametrize("name", TRANSCRIPTS)


def transcript(name: str) -> str:
    return (ROOT / "docs" / "transcripts" / TRANSCRIPTS[name]).read_text(encoding="utf-8")


@every_walkthrough
def test_walkthrough_fits_the_code_and_its_transcript(name: str, capsys: Any) -> None:
    exit_code = importlib.import_module(name).main(["--auto"])
    captured = capsys.readouterr()
    assert (exit_code, captured.err) == (0, "")
    assert captured.out == transcript(name), (
        f"python -m {name} --auto > docs/transcripts/{TRANSCRIPTS[name]}"
    )


@every_walkthrough
def test_list_imports_no_torch(name: str) -> None:
    program = f"import sys, {name} as w; w.main(['--list']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


@every_walkthrough
def test_transcript_is_80_columns_wide_and_names_no_absolute_path(name: str) -> None:
    text = transcript(name)
    assert max(map(len, text.splitlines())) <= 80
    assert str(ROOT) not in text
    assert " at 0x" not in text


@every_walkthrough
def test_every_stop_has_a_note_and_something_to_look_at(name: str) -> None:
    for stop in importlib.import_module(name).GUIDE.stops:
        assert stop.looks, stop.title
        assert "`" in stop.hint, stop.title
        assert 1 <= stop.note.count(". ") + 1 <= 4, stop.title
        written = f"{stop.function.__module__.replace('.', '/')}.py::{stop.function.__qualname__}"
        assert stop.location == written, stop.title
