"""Every record of a measurement says how it was made, and so does every program that writes one."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

import m1_single.bench
from docs.docs_commands import check_exists
from docs.measured import parts
from helpers.forked import run_python
from milestone_llm.lab.bench.record import FIELDS

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "measurements").iterdir())
PAGES = [*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/reference/*.md")]
NUMBER = r"\d[\d,]*(?:\.\d+)?"
OTHER_ENGINE = re.compile(r"\bvllm\b", re.IGNORECASE)
SPEED = re.compile(r"\d (?:tok/s|tokens a second|us|ms|s)\b")


def fields_of(record: Path) -> list[tuple[str, str]]:
    """Names and values, one after the other; a record of several commands names each."""
    text = record.read_text(encoding="utf-8")
    if record.suffix == ".md":
        yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    return list(json.loads(text).items()) if record.suffix == ".json" else parts(text)[0]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_a_record_says_how_when_where_and_of_what_code(record):
    fields = fields_of(record)
    named = {name: value for name, value in fields if name in FIELDS}
    assert tuple(named) == FIELDS
    assert all(isinstance(value, str) and value for value in named.values())
    for name, value in fields:
        if name == "command" and "runs at" not in dict(fields):
            check_exists(shlex.split(value), ROOT)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", named["date"])
    assert "CPU" in named["machine"]
    assert not re.search(r"(^|[\s'\"=])/", " ".join(named.values())), "a path of one machine"


def test_a_bench_writes_them_in_both_forms(tmp_path, capsys):
    paths = [tmp_path / "x.json", tmp_path / "x.md"]
    small = ["--model", "tiny-llama", "--num-requests", "2", "--output-len", "2", "2"]
    words = [*small, "--json", str(paths[0]), "--markdown", str(paths[1])]
    assert m1_single.bench.main(words) == 0
    for path in paths:
        fields = dict(fields_of(path))
        assert set(FIELDS) <= set(fields)
        assert fields["command"].startswith("python -m m1_single.bench --model tiny-llama")


def test_what_a_program_prints_becomes_a_record(tmp_path):
    record = tmp_path / "x.md"
    command = ["python", "-m", "docs.questions.scale_routing"]  # quick: it imports no torch
    assert run_python("docs/record.py", record, *command).returncode == 0
    fields, text = parts(record.read_text(encoding="utf-8"))
    assert tuple(dict(fields)) == FIELDS
    assert text.strip().startswith(f"```console\n$ {' '.join(command)}\n")


def test_a_page_names_the_command_of_its_record():
    def bare(command: str) -> str:
        return re.sub(r" --(json \S+|markdown \S+|measure\b)", "", " ".join(command.split()))

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for record, command in re.findall(r"<!-- measured: (\S+)\s+by: (.*?) -->", text):
            made_by = [value for name, value in fields_of(ROOT / record) if name == "command"]
            assert bare(command) in map(bare, made_by), f"{page.name}: {record}"


def sources(page: Path, text: str) -> list[Path]:
    """The records and pages that it links to."""
    links = re.findall(r"\]\(([^)#\s:]+\.(?:md|json))", text)
    return [page.parent / link for link in links if not link.endswith("glossary.md")]


def quotes(page: Path) -> Iterator[tuple[str, list[Path]]]:
    """Paragraphs that link to a record or to a page of measurements, and rows that do, or whose
    table has such a link in it or beside it: what is quoted, and where it must be. So it is, link
    or not, where a speed of another engine is named."""
    text = page.read_text(encoding="utf-8")
    written = re.sub(r"```.*?```|<!-- measured:.*?<!-- end -->|<!--.*?-->", "", text, flags=re.S)
    blocks = ["", *filter(None, map(str.strip, re.split(r"\n\s*\n", written))), ""]
    for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        found = [
            [file for file in sources(page, each) if "measure" in file.as_posix()]
            for each in (block, before, after)
        ]
        if not block.startswith("|"):
            is_claim = OTHER_ENGINE.search(block) and SPEED.search(block)
            yield from [(block, sources(page, block))] if found[0] or is_claim else []
            continue
        for row in block.splitlines()[2:]:
            yield row, sources(page, row) or next(filter(None, found), [])


def figures(text: str) -> list[str]:
    """Numbers of at least two digits; in a row, those of cells that begin with one."""
    if text.startswith("|"):
        text = "  ".join(cell for cell in text.split("|") if cell.strip(" `*")[:1].isdigit())
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    found = re.findall(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?=x?(?:[\s%,;:)]|\.\s|$))", text)
    return [each for each in found if len(each) > 1]


def lines_of(file: Path) -> list[str]:
    """Without ranges, (low..high). Of a bench's JSON, a line for each contestant's medians."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return re.sub(r"\([\d.,]+\.\.[\d.,]+\)", "", text).splitlines()
    data = json.loads(text)
    parts = [data.get(name, {}) for name in ("contestants", "speedups")]
    return [f"{name}  {own['median']}" for part in parts for name, own in part.items()]


def is_in(figure: str, lines: Iterable[str]) -> bool:
    """Whether a line has it, or what is rounded to it; a share may be written in percent."""
    value, error = float(figure.replace(",", "")), 0.501 * 10.0 ** -len(figure.partition(".")[2])
    there = [float(n.replace(",", "")) for line in lines for n in re.findall(NUMBER, line)]
    return any(abs(value - each) < error or abs(value - 100 * each) < error for each in there)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_beside_a_link_to_a_record_are_in_the_record(page: Path) -> None:
    for text, files in quotes(page):
        lines = [line for file in files for line in lines_of(file)]
        first = re.escape(text.split("|")[1].strip(" `*")) if text.startswith("|") else ""
        named = [line for line in lines if first and re.match(rf"[ |]*{first}(  | \|)", line)]
        assert files or not OTHER_ENGINE.search(text) or not figures(text), f"no record: {text}"
        for figure in figures(text) if files else ():
            assert is_in(figure, named or lines), (
                f"{figure}, {[file.name for file in files]}: {text}"
            )
