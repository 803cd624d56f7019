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
    assert str(ROOT) not in captured.out
    assert captured.out == transcript(name), (
        f"python -m {name} --auto > docs/transcripts/{TRANSCRIPTS[name]}"
    )


@every_walkthrough
def test_list_imports_no_torch(name: str) -> None:
    program = f"import sys, {name} as w; w.main(['--list']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
