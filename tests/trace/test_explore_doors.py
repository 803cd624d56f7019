"""`--explore PATH.html` of a demo writes the page of what they did."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest


def traces_in(page: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What the page says of each trace, and its lines."""
    packed = re.findall(r'<script type="text/x-trace">(.*?)</script>', page.read_text("utf-8"))
    texts = [gzip.decompress(base64.b64decode(each)).decode() for each in packed]
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return [(meta, rest) for meta, *rest in lines]


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize(
    ("arguments", "milestones"),
    [
        ([], ["m1_single"]),
        ([], ["m1_single", "m2_batching"]),
        ([], ["m3_paged"]),
        (["--part", "2", "--long-prompt-tokens", "80"], ["m4_prefix_chunked"] * 2),
    ],
)
def test_a_demo_writes_the_page_of_its_runs(arguments, milestones, tmp_path, capsys):
    main = importlib.import_module(f"{milestones[-1]}.demo").main
    page = tmp_path / "run.html"
    options = ["--model", "tiny-llama", "--max-tokens", "3", "--out", str(tmp_path)]
    assert main([*options, *arguments, "--explore", str(page)]) == 0
    found = traces_in(page)
    assert [lines[0]["milestone"] for _, lines in found] == milestones
    assert all(len(lines) > 2 and meta["budget"] for meta, lines in found)
    assert "run.html" in "".join(capsys.readouterr().out.split())
