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

TINY = ["--model", "tiny-llama"]


def traces_in(page: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What the page says of each trace, and its lines."""
    packed = re.findall(r'<script type="text/x-trace">(.*?)</script>', page.read_text("utf-8"))
    texts = [gzip.decompress(base64.b64decode(each)).decode() for each in packed]
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return [(meta, rest) for meta, *rest in lines]


@pytest.mark.parametrize(
    ("door", "arguments", "pages"),
    [
        ("m1_single.demo", ["--max-tokens", "3"], {"run": ["m1_single"]}),
        ("m2_batching.demo", ["--max-tokens", "3"], {"run": ["m1_single", "m2_batching"]}),
        ("m3_paged.demo", ["--max-tokens", "3"], {"run": ["m3_paged"]}),
        (
            "m4_prefix_chunked.demo",
            ["--part", "2", "--max-tokens", "3", "--long-prompt-tokens", "80"],
            {"run": ["m4_prefix_chunked"] * 2},
        ),
    ],
)
def test_a_door_writes_the_page_of_its_runs(door, arguments, pages, tmp_path, capsys):
    main = importlib.import_module(door).main
    page = tmp_path / "run.html"
    assert main([*TINY, *arguments, "--out", str(tmp_path), "--explore", str(page)]) == 0
    printed = "".join(capsys.readouterr().out.split())
    for name, milestones in pages.items():
        found = traces_in(tmp_path / f"{name}.html")
        assert [lines[0]["milestone"] for _, lines in found] == milestones
        assert all(len(lines) > 2 for _, lines in found)
        assert all(meta["budget"] for meta, _ in found)
        assert f"{name}.html" in printed
