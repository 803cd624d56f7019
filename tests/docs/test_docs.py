"""The pages say what their commands print, and the builder would notice if they did not."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.forked import run_python
from milestone_llm.lab.bench.running_server import running_server

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "exercises/README.md",
]
WITH_COMMANDS = [  # the Chinese pages have the outputs of the English ones: test_chinese.py
    page
    for page in PAGES
    if page.parent.name != "zh" and re.search("<!-- (run|draw): ", page.read_text(encoding="utf-8"))
]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def build():
    """docs/build.py as a module."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["docs_build"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_a_page_says_what_its_commands_print(page):
    check = run_python("docs/build.py", "--check", "--quick", page)
    assert check.returncode == 0, check.stderr


def test_pages_without_commands_are_as_they_are_built():
    rest = [page for page in PAGES if page not in WITH_COMMANDS]
    check = run_python("docs/build.py", "--check", "--quick", *rest)
    assert check.returncode == 0, check.stderr


def test_what_tables_of_files_and_names_call_ours_is_called_so_in_the_code():
    packages = [*ROOT.glob("m[1-5]_*/**/*.py"), *ROOT.glob("milestone_llm/**/*.py")]
    words = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in packages)))
    names = (ROOT / "docs/reference/names.md").read_text(encoding="utf-8")
    table = names[names.index("| here |") :].splitlines()[2:]
    rows = [row.split("|")[1] for row in table if row.startswith("|")]
    for page in ROOT.glob("docs/m*_*.md"):
        rows += re.findall(r"^\| \[.*$", page.read_text(encoding="utf-8"), flags=re.M)
    assert len(rows) > 50
    for row in rows:
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", row):
            assert words.issuperset(name.split(".")), f"no code has {name}: {row}"


@pytest.mark.usefixtures("smollm2")
def test_the_program_of_the_readme_runs(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert "max_tokens=20" in program
    program = program.replace("max_tokens=20", "max_tokens=8")  # each takes 0.1 s
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "The capital of France is Paris." in printed
    assert "bees 8 length" in printed


@pytest.mark.slow  # a server with the real model
@pytest.mark.usefixtures("smollm2")
@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_curl_of_the_readme_is_answered_as_it_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ((command, answer),) = re.findall(r"```sh\n(curl .*?)\n# \.\.\. (.*?) \.\.\.\n```", text, re.S)
    with running_server(["m5_kernels.serve", "--max-model-len", "512"]) as url:
        command = command.replace("http://127.0.0.1:8000", url)
        answered = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert answer in answered.stdout


PAGE = """# A page

<!-- run: python -m m1_single.walkthrough --list
from: M1
to: Watch
-->
"""


def built(build, monkeypatch, tmp_path, text, output, **options):
    """A page after a build in which every command prints `output`, and the builder."""
    monkeypatch.setattr(build.docs_commands, "output_of", lambda words, root: output)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    builder = build.Builder(**options)
    builder.page(tmp_path / "page.md")
    return (tmp_path / "page.md").read_text(), builder


def test_a_page_is_filled_and_one_that_says_otherwise_is_noticed(build, monkeypatch, tmp_path):
    output = "before\nM1: title\nfirst\n\nWatch this\n"
    once, _ = built(build, monkeypatch, tmp_path, 2 * PAGE, output)
    assert once.count(" --list\n...\nM1: title\nfirst\n...\n```\n") == 2
    twice, _ = built(build, monkeypatch, tmp_path, once, output)
    assert twice == once
    _, builder = built(build, monkeypatch, tmp_path, once, output, is_check=True)
    assert builder.problems == []
    edited = once.replace("first", "pasted by hand", 1)
    after, builder = built(build, monkeypatch, tmp_path, edited, output, is_check=True)
    assert after == edited
    assert "-pasted by hand" in builder.problems[0]


def test_times_may_differ_and_nothing_else(build, monkeypatch, tmp_path):
    page = PAGE.replace("to: Watch", "vary: times")
    once, _ = built(build, monkeypatch, tmp_path, page, "M1: 3 rows, execute 12.5 ms\n")
    for output, num_problems in (
        ("M1: 3 rows, execute  9.1 ms\n", 0),
        ("M1: 4 rows, execute 12.5 ms\n", 1),
    ):
        _, builder = built(build, monkeypatch, tmp_path, once, output, is_check=True)
        assert len(builder.problems) == num_problems
        again, _ = built(build, monkeypatch, tmp_path, once, output)
        assert (again != once) == num_problems


def test_a_link_to_code_gets_the_line_of_its_function(build, monkeypatch, tmp_path):
    (tmp_path / "loop.py").write_text(
        "import ast\n\n\nclass Loop:\n    def step(self):\n        pass\n"
    )
    text = "See [`Loop.step`](loop.py#L1) and [`Loop`](loop.py#L4).\n"
    once, _ = built(build, monkeypatch, tmp_path, text, "")
    assert once == "See [`Loop.step`](loop.py#L5) and [`Loop`](loop.py#L4).\n"
    _, builder = built(build, monkeypatch, tmp_path, text, "", is_check=True)
    assert "+[`Loop.step`](loop.py#L5)" in builder.problems[0]
    with pytest.raises(ValueError, match=r"loop.py has no Loop.stop"):
        built(build, monkeypatch, tmp_path, "[`Loop.stop`](loop.py#L1)", "")
    translation = tmp_path / "docs/zh/page.md"
    translation.parent.mkdir(parents=True)
    (tmp_path / "docs/page.md").write_text("[`Loop`](../loop.py#L4)")
    translation.write_text("见 [`Loop`](../../loop.py#L1)。", encoding="utf-8")
    monkeypatch.setattr(build.chinese, "ROOT", tmp_path)
    build.Builder().page(translation)
    assert translation.read_text(encoding="utf-8") == "见 [`Loop`](../../loop.py#L4)。"
