"""Fill the documentation with the output and the pictures of its commands.

    python docs/build.py            run every command, fill the files in
    python docs/build.py --check    run every command, fail where a file says otherwise
    python docs/build.py --check --quick    the same without commands marked `slow`
    python docs/build.py docs/m2_batching.md    only this file

A Markdown file asks for output with a comment, and the builder writes the lines after it:

    <!-- run: python -m m1_single.walkthrough --auto      the fenced block below is its output
    from: Stop 4 of 14                                   ... from the line with this text
    to: Stop 5 of 14                                     ... up to the line with this text
    vary: times | all                                    ... compared without times, or only run
    slow: yes -->                                        ... left out by --quick
    <!-- draw: COMMAND -o docs/images/x.png -->          the picture below is drawn by it
    <!-- measured: docs/measurements/x.json by: COMMAND --> ... <!-- end -->    recorded figures
    <!-- table: COMMAND --> ... <!-- end -->             its output, as Markdown
    <!-- code: m1_single/runner.py ModelRunner.launch -->    the block below is that function

A page of docs/zh/ gets all of this from its English page: docs/chinese.py.

A link such as [`EngineCore.step`](../milestone_llm/core/engine_core.py#L1) gets the number of the
line where that function or class begins.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import shlex
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import chinese
import docs_commands
from measured import measured, runs_at

ROOT = Path(__file__).resolve().parents[1]
ENGLISH = sorted({*(ROOT / "docs").rglob("*.md")} - {*chinese.pages()})
PAGES = [ROOT / "README.md", *ENGLISH, *chinese.pages()]

_COMMENT = re.compile(r"<!-- (?P<kind>run|draw): (?P<body>.*?)-->\n", re.S)
_RUN_BLOCK = re.compile(r"\n*```console\n.*?\n```\n", re.S)
_PICTURE = re.compile(r"\n*(!\[[^\]]*\]\([^)]*\))\n(?:\n?`[^`]*`\n)?")
_MEASURED = re.compile(r"(<!-- measured: (\S+)\s+by: (.*?) -->\n).*?(<!-- end -->)", re.S)
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.S)
_CODE = re.compile(r"(<!-- code: (\S+) (\S+) -->\n).*?\n```\n", re.S)
_CODE_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<file>(?!https:)[^)#\s]+\.py)#L\d+\)")
_NUMBER_OF_TIME = re.compile(r"[\d,.]+ ?(ms|s|tok/s|us|x)\b")


@dataclass(frozen=True)
class Marker:
    """A comment that asks for a command's output."""

    kind: str
    command: str
    options: dict[str, str]
    end: int
    """Position in the page where the comment ends."""


def markers(text: str) -> list[Marker]:
    """Return the markers of a page, in order.

    Raises:
        ValueError: a marker has an option that does not exist.
    """
    found = []
    for match in _COMMENT.finditer(text):
        command, *lines = match["body"].strip().split("\n")
        options = {
            name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        unknown = set(options) - {"from", "to", "vary", "slow"}
        if unknown:
            raise ValueError(f"{command}: a marker has no option {', '.join(sorted(unknown))}")
        found.append(Marker(match["kind"], command.strip(), options, match.end()))
    return found


class Builder:
    """Runs the commands of pages. It writes their outputs, or reports where the pages differ."""

    def __init__(self, is_check: bool = False, is_quick: bool = False):
        self.is_check, self.is_quick = is_check, is_quick
        self.problems: list[str] = []
        self.outputs: dict[str, str] = {}

    def page(self, path: Path) -> None:
        """Update one page, or check that it is up to date."""
        text = path.read_text(encoding="utf-8")
        new = self._chinese(path, text) if path in chinese.pages() else self._built(path, text)
        if not self.is_check:
            path.write_text(new, encoding="utf-8")

    def _chinese(self, path: Path, text: str) -> str:
        """Return a Chinese page with what the English one, which is built before, has."""
        new = self._with_lines(path, chinese.filled(path, text))
        if self.is_check and new != text:
            self._differs(path.relative_to(ROOT).as_posix(), "the English page", text, new)
        return new

    def _built(self, path: Path, text: str) -> str:
        """Return a page with the outputs of its commands."""
        where = path.relative_to(ROOT).as_posix()
        for marker in reversed(markers(text)):  # from the end, so that positions stay valid
            docs_commands.check_exists(shlex.split(marker.command), ROOT)
            if self.is_quick and marker.options.get("slow") == "yes":
                continue
            fill = self._run if marker.kind == "run" else self._draw
            text = text[: marker.end] + fill(where, marker, text[marker.end :])
        text, count = _MEASURED.subn(lambda match: self._measured(where, match), text)
        if count != text.count("<!-- measured: "):
            raise ValueError("`<!-- measured: ... -->` has no `<!-- end -->`")
        text = _TABLE.sub(lambda match: self._table(where, match), text)
        text = _CODE.sub(lambda match: self._code(where, match), text)
        return self._with_lines(path, text)

    def _output(self, command: str) -> str:
        """Return what a command prints. Each command is run once.

        Raises:
            RuntimeError: it failed.
        """
        if command not in self.outputs:
            print(f"$ {command}", file=sys.stderr, flush=True)
            self.outputs[command] = docs_commands.output_of(shlex.split(command), ROOT)
        return self.outputs[command]

    def _run(self, where: str, marker: Marker, rest: str) -> str:
        block = _RUN_BLOCK.match(rest)
        old = block[0] if block else ""
        output = excerpt(self._output(marker.command), marker.options)
        new = f"\n```console\n$ {marker.command}\n{output}\n```\n"
        vary = marker.options.get("vary", "")
        if old and comparable(old, vary) == comparable(new, vary):
            new = old  # different times are no reason to change a page
        elif self.is_check:
            self._differs(where, marker.command, old, new)
        return new + rest[len(old) :]

    def _draw(self, where: str, marker: Marker, rest: str) -> str:
        picture = _PICTURE.match(rest)
        if picture is None:
            raise ValueError(f"{where}: after `draw: {marker.command}` comes no ![...](...)")
        words = shlex.split(marker.command)
        path = ROOT / words[words.index("-o") + 1]
        if not self.is_check:
            self._output(marker.command)
        else:
            with tempfile.TemporaryDirectory() as folder:
                drawn = Path(folder) / path.name
                words[words.index("-o") + 1] = str(drawn)
                self._output(shlex.join(words))
                if not path.exists() or not docs_commands.look_alike(drawn, path):
                    self.problems.append(
                        f"{path.relative_to(ROOT)} is not what this draws: {marker.command}"
                    )
        return f"\n{picture[1]}\n" + rest[picture.end() :]

    def _table(self, where: str, match: re.Match[str]) -> str:
        new = f"{match[1]}\n{self._output(match[2])}\n\n{match[3]}"
        if self.is_check and new != match[0]:
            self._differs(where, match[2], match[0], new)
        return new

    def _measured(self, where: str, match: re.Match[str]) -> str:
        comment, source, command, end = match.groups()
        if not runs_at((ROOT / source).read_text(encoding="utf-8")):
            docs_commands.check_exists(shlex.split(command), ROOT)
        new = comment + measured(ROOT / source, command) + end
        if self.is_check and new != match[0]:
            self._differs(where, source, match[0], new)
        return new

    def _code(self, where: str, match: re.Match[str]) -> str:
        """The comment, and below it the function as it is now."""
        comment, source, name = match.groups()
        new = f"{comment}\n```python\n{code_of(ROOT / source, name)}\n```\n"
        if self.is_check and new != match[0]:
            self._differs(where, f"{source} {name}", match[0], new)
        return new

    def _with_lines(self, path: Path, text: str) -> str:
        """Return a page whose code links have the lines of now."""
        return _CODE_LINK.sub(lambda match: self._code_link(path, match), text)

    def _code_link(self, page: Path, match: re.Match[str]) -> str:
        """Return the link with the line at which its function begins now."""
        number = line_of(page.parent / match["file"], match["name"])
        new = f"[`{match['name']}`]({match['file']}#L{number})"
        if self.is_check and new != match[0]:
            self._differs(page.relative_to(ROOT).as_posix(), "link", match[0], new)
        return new

    def _differs(self, where: str, command: str, old: str, new: str) -> None:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), where, command, lineterm=""
        )
        self.problems.append("\n".join(list(lines)[:60]))


def line_of(path: Path, name: str) -> int:
    """Return the line where a function or class begins."""
    return _definition(path, name).lineno


def code_of(path: Path, name: str) -> str:
    """Return the lines of a function or class, without its docstring."""
    node = _definition(path, name)
    lines = path.read_text(encoding="utf-8").splitlines()
    first = node.body[1 if ast.get_docstring(node) else 0]
    kept = [*lines[node.lineno - 1 : node.body[0].lineno - 1]]
    return textwrap.dedent("\n".join([*kept, *lines[first.lineno - 1 : node.end_lineno]]))


def _definition(path: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return a function or class. `Class.function` is one inside a class.

    Raises:
        ValueError: the file has no function or class of that name.
    """
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        inside = (each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == part)
        found = next(inside, None)
        if not isinstance(found, ast.FunctionDef | ast.ClassDef):
            raise ValueError(f"{path.name} has no {name}")
        node = found
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node


def excerpt(output: str, options: dict[str, str]) -> str:
    """Return the lines from the one that contains `from` up to the next that contains `to`.

    Raises:
        ValueError: there is no such line.
    """
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    first, end = 0, len(lines)
    if "from" in options:
        first = _line_with(lines, options["from"], 0)
    if "to" in options:
        end = _line_with(lines, options["to"], first + 1)
    kept = "\n".join(lines[first:end]).rstrip("\n")
    return ("...\n" if first else "") + kept + ("\n..." if end < len(lines) else "")


def _line_with(lines: list[str], words: str, first: int) -> int:
    found = next((n for n, line in enumerate(lines) if n >= first and words in line), None)
    if found is None:
        raise ValueError(f"no line of the output holds {words!r}:\n" + "\n".join(lines[:20]))
    return found


def comparable(text: str, vary: str) -> str:
    """Return the part of a block that is compared: for `times`, without numbers of ms, s, tok/s and
    similar; for `all`, only its first line, the command.
    """
    if vary == "all":
        return text.strip().split("```console\n")[1].split("\n")[0]
    if vary == "times":
        text = re.sub(r" +", " ", _NUMBER_OF_TIME.sub(r"# \1", text))
    return text.strip()


def main(argv: list[str] | None = None) -> int:
    """Build or check. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, help="default: README.md and docs/")
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    parser.add_argument("--quick", action="store_true", help="skip commands marked slow")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    builder = Builder(options.check, options.quick)
    for page in [path.resolve() for path in options.pages] or PAGES:
        try:
            builder.page(page)
        except (ValueError, OSError, RuntimeError) as error:
            builder.problems.append(f"{page.relative_to(ROOT)}: {error}")
    for problem in builder.problems:
        print(problem, end="\n\n", file=sys.stderr)
    if builder.problems and options.check:
        print("`python docs/build.py` brings the documentation up to date.", file=sys.stderr)
    return bool(builder.problems)


if __name__ == "__main__":
    sys.exit(main())
