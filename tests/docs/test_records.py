"""Every record of a measurement says how it was made, and so does every program that writes one."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import m1_single.bench
from docs.docs_commands import check_exists
from docs.measured import parts
from forked import run_python
from milestone_llm.lab.bench.record import FIELDS

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "measurements").iterdir())


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

    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/reference/*.md")]:
        text = page.read_text(encoding="utf-8")
        for record, command in re.findall(r"<!-- measured: (\S+)\s+by: (.*?) -->", text):
            made_by = [value for name, value in fields_of(ROOT / record) if name == "command"]
            assert bare(command) in map(bare, made_by), f"{page.name}: {record}"


def test_tables_that_pages_have_of_the_cpu_are_the_records():
    record = (ROOT / "docs" / "measurements" / "cpu_engines.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ (\S.*?)  +(\d.*)$", record, flags=re.MULTILINE)
    medians = {name: re.findall(r"([\d,]+) \(", figures) for name, figures in lines}
    names = {"Hugging Face, a batch": "HF batch", "Hugging Face, continuous": "HF continuous"}
    page = (
        (ROOT / "docs" / "m5_cpu.md").read_text(encoding="utf-8").partition("## Beside others")[2]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.match(r"\| [HMl]", line)
    ]
    assert len(rows) == 8
    for name, *figures in rows:
        assert figures == medians[names.get(name, name)], name
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("M5, the file's bits", "llama.cpp"):
        assert all(figure in readme for figure in medians[name][:2])
