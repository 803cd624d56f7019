"""The notebook of the first hour, run cell by cell as Jupyter does."""

from __future__ import annotations

import ast
import html
import json
from pathlib import Path
from typing import Any

import pytest

import m3_paged
from helpers.engines import greedy
from helpers.servers import save_tiny_model
from milestone_llm.core.errors import InputError
from milestone_llm.lab.notebook import explore

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first_hour.ipynb"


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last line, if that is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_its_cells_run_and_show_what_they_say(tmp_path, monkeypatch, capsys):
    model = save_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 12
    assert not any(cell.get("outputs") for cell in cells)
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("smollm2-135m", str(model))
            shown.append(run(source, names))
    engine, output, texts, waits, _, page, _, order = shown
    assert "<td" in engine._repr_html_()
    assert "kv.used" in engine._repr_html_()
    assert "France" in output._repr_html_()
    assert (len(texts), len(waits)) == (4, 4)
    assert "'r4': 'max_num_seqs=3" in capsys.readouterr().out
    frame = page._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert html.unescape(frame.split('"')[1]) == page.text
    assert "text/x-trace" in page.text
    assert order == [3, 6, 9]


def test_texts_in_a_table_are_escaped(tmp_path):
    engine = m3_paged.LLMEngine(str(save_tiny_model(tmp_path)), max_model_len=64)
    (output,) = engine.generate("<script>", greedy(2))
    assert "<script>" not in output._repr_html_()
    assert "&lt;script&gt;" in output._repr_html_()
    assert "m3_paged.LLMEngine" in repr(engine)


def test_what_has_no_trace_is_no_page():
    engine = m3_paged.LLMEngine("tiny-llama", max_model_len=64)
    with pytest.raises(InputError, match="trace='memory'"):
        explore(engine)
    with pytest.raises(InputError, match="one or two engines, got 0"):
        explore()
