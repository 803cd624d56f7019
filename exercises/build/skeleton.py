"""Make the reader's files: a milestone's own, without the bodies that the reader writes."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True)
class Todo:
    """A task: what to write in place of a function's body, or of a part of it."""

    hint: str
    first: int = 0
    last: int | None = None
    """The statements from `first` to before `last`, counted after the docstring, are left out."""


@dataclass(frozen=True)
class File:
    """A file that the reader writes."""

    source: str
    """The milestone's own file, from the root of the repository."""
    todo: Mapping[str, str | Todo]
    """A hint for each function or `Class.method` that the reader writes."""
    notes: str = ""
    """Text for the reader at the file's beginning, after the milestone's own docstring."""
    without: Sequence[str] = ()
    """Methods to leave out: only the milestone's own bodies call them."""

    @property
    def name(self) -> str:
        """The name of both files."""
        return PurePath(self.source).name

    @property
    def module(self) -> str:
        """The milestone's own file, as a module name."""
        return ".".join(PurePath(self.source).with_suffix("").parts)

    def text(self, source: str, own: Mapping[str, str]) -> str:
        """Return the text with which the reader begins.

        Args:
            source: the text of the milestone's own file.
            own: for each module of the milestone, the reader's module in its place.
        """
        tree, lines = ast.parse(source), source.splitlines()
        for name, node in reversed(list(_functions(tree))):
            if name in self.without:
                del lines[node.lineno - 1 : (node.end_lineno or 0) + 1]
            elif todo := self.todo.get(name):
                todo = Todo(todo) if isinstance(todo, str) else todo
                last = len(node.body) - 1 if todo.last is None else todo.last
                begin, end = (node.body[index].end_lineno or 0 for index in (todo.first, last))
                lines[begin:end] = _raise(todo.hint, node.col_offset + 4)
        docstring, end = ast.get_docstring(tree) or "", tree.body[0].end_lineno or 0
        text = "\n".join([f'"""{docstring}\n\n{self.notes}', '"""', *lines[end:], ""])
        package = self.module.rpartition(".")[0]

        def absolute(found: re.Match[str]) -> str:
            module = f"{package}{found[1]}" if found[1].startswith(".") else found[1]
            return f"from {own.get(module, module)} import"

        return re.sub(r"^from (\S+) import", absolute, text, flags=re.M)


def _functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Return functions and methods with their names, in the order of the file."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found += [(f"{node.name}.{each.name}", each) for each in methods]
    return found


def _raise(hint: str, indent: int) -> list[str]:
    """Return the lines that the reader replaces: they raise NotImplementedError with the hint."""
    lines = textwrap.wrap(hint, 100 - indent - 8, drop_whitespace=False)
    parts = [f"{' ' * (indent + 4)}{line!r}" for line in lines]
    return [f"{' ' * indent}raise NotImplementedError(", *parts, f"{' ' * indent})"]
