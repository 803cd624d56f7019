"""The pages say what their commands print, and the builder would notice if they did not."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from forked import run_python

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "exercises/README.md",
]
WITH_COMMANDS = [
    page for page in PAGES if re.search("<!-- (run|write|draw): ", page.read_text(encoding="utf-8"))
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


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)


@functools.cache
def anchors(page):
    """The anchors of a page's headings: "Two ideas, `one` [link](x)" has "two-ideas-one-link"."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    words = (re.sub(r"\]\(.*?\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w -]", "", word).replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", prose(page)):
        if not target.startswith("http"):
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{target} is not there"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{target} has no heading #{anchor}"


def test_what_chapters_name_in_their_tables_of_files_is_still_called_so():
    packages = [*ROOT.glob("m[1-5]_*/**/*.py"), *ROOT.glob("milestone_llm/**/*.py")]
    sources = " ".join(path.read_text(encoding="utf-8") for path in packages)
    words = set(re.findall(r"\w+", sources))
    for page in ROOT.glob("docs/m*_*.md"):
        for row in re.findall(r"^\| \[.*$", page.read_text(encoding="utf-8"), flags=re.M):
            names = re.findall(r"`([A-Za-z_][\w.]*)`", row)
            unknown = [name for name in names if not words.issuperset(name.split("."))]
            assert not unknown, f"{page.name}: no code has {', '.join(unknown)}"


def test_the_chinese_readme_says_what_the_english_one_says():
    """As far as it can be seen: headings, code, links and figures."""
    ours, theirs = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")
    )
    for pattern in (
        r"^#+ ",
        r"^```(?:python|text|console)\n.*?^```",
        r"^(?:make|python) \S+ ?\S*",
        r"\d{1,3},\d{3}",
        r"^\| .*?\| ([\d,]+)",
    ):
        found = [re.findall(pattern, text, flags=re.S | re.M) for text in (ours, theirs)]
        assert found[0] == found[1], pattern
    links = [
        set(re.findall(r"\]\(([^)]*)\)", text)) - {"README.md", "README.zh.md"}
        for text in (ours, theirs)
    ]
    assert links[0] == links[1]


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


def test_a_page_is_filled_and_stays_as_it_is(build, monkeypatch, tmp_path):
    output = "before\nM1: title\nfirst\n\nWatch this\n"
    once, _ = built(build, monkeypatch, tmp_path, PAGE, output)
    assert (
        "```console\n$ python -m m1_single.walkthrough --list\n...\nM1: title\nfirst\n...\n```"
        in once
    )
    twice, builder = built(build, monkeypatch, tmp_path, once, output)
    assert twice == once
    _, builder = built(build, monkeypatch, tmp_path, once, output, is_check=True)
    assert builder.problems == []


def test_a_page_that_says_otherwise_is_noticed_and_left_alone(build, monkeypatch, tmp_path):
    once, _ = built(build, monkeypatch, tmp_path, PAGE, "M1: title\nfirst\nWatch this\n")
    edited = once.replace("first", "pasted by hand")
    after, builder = built(
        build, monkeypatch, tmp_path, edited, "M1: title\nfirst\nWatch this\n", is_check=True
    )
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
    fresh, _ = built(
        build, monkeypatch, tmp_path, once, "M1: 3 rows, execute 9.1 ms\n", is_fresh=True
    )
    assert "execute 9.1 ms" in fresh


def test_a_command_that_is_not_there_is_an_error(build, monkeypatch, tmp_path):
    page = PAGE.replace("m1_single.walkthrough", "m1_single.no_such_module")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(ValueError, match="there is no command"):
        build.Builder().page(tmp_path / "page.md")


def test_a_slow_command_is_left_out_of_a_quick_check(build, monkeypatch, tmp_path):
    page = PAGE.replace("to: Watch", "slow: yes")
    after, builder = built(
        build, monkeypatch, tmp_path, page, "something else", is_check=True, is_quick=True
    )
    assert (after, builder.problems) == (page, [])


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


def test_a_page_says_how_long_it_takes_to_read(build, monkeypatch, tmp_path):
    folded = "<details>\n" + "word " * 900 + "\n</details>\n"
    text = "# A page\n\n<!-- reading time -->\n\n" + "word " * 448 + folded
    once, _ = built(build, monkeypatch, tmp_path, text, "")
    assert "<!-- reading time -->\n*3 minutes to read, without what is folded away.*\n" in once
    longer = once + "word " * 300
    _, builder = built(build, monkeypatch, tmp_path, longer, "", is_check=True)
    assert builder.problems == [], "the next build says it anew"
    twice, _ = built(build, monkeypatch, tmp_path, once, "")
    assert twice == once


def test_recorded_figures_come_from_their_file(build, tmp_path):
    measured = build.measured
    assert "Not recorded yet" in measured(tmp_path / "none.json", "python -m m2_batching.bench")
    (tmp_path / "table.md").write_text("| a | b |\n")
    assert "| a | b |" in measured(tmp_path / "table.md", "python -m m3_paged.bench")


def test_a_command_runs_in_a_fork_with_its_environment(tmp_path):
    show, ask = tmp_path / "show.py", tmp_path / "ask.py"
    show.write_text("import os, sys; print(*map(os.getenv, ['COLUMNS', 'LLM_TRACE']), sys.argv)")
    ask.write_text(
        "import sys; from pathlib import Path; sys.path.insert(0, 'docs'); import docs_commands;"
        "print(docs_commands.output_of(sys.argv[1:], Path.cwd()))"
    )
    asked = run_python(ask, "LLM_TRACE=1", "python", show, "x")
    assert asked.stdout.strip() == f"80 1 {[str(show), 'x']}", asked.stderr
