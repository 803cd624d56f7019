"""Which files an engine is made of: what it imports inside this project, and what those import."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def engine_map(module: str) -> dict[str, dict[str, int]]:
    """Lines of each file that `module` runs, by folder; the milestone's own folder first.

    Imports are read and not run, those inside functions too. Instruments (`tools/`) and the files
    that packages begin with are left out.
    """
    found: set[str] = set()
    pending = {module}
    while pending:
        name = pending.pop()
        found.add(name)
        pending |= {_file_of(*used) for used in _used(name)} - found - {""}
    folders: dict[str, dict[str, int]] = {}
    for name in sorted(found, key=lambda name: (name.split(".")[0] != module.split(".")[0], name)):
        folder, _, stem = name.replace(".", "/").rpartition("/")
        folders.setdefault(folder, {})[stem] = _source(name).count("\n")
    return folders


def _used(name: str) -> Iterator[tuple[str, str]]:
    """What a module takes from others: (module, name) of each."""
    for node in ast.walk(ast.parse(_source(name))):
        if isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, name.rpartition(".")[0])
            yield from ((base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr  # after `import m3_paged`


def _file_of(base: str, name: str) -> str:
    """The module of this project that `name` of module `base` comes from; empty: none."""
    for module in (f"{base}.{name}", base):
        if _path(module).is_file():
            return "" if ".tools." in module else module
    root = f"{base}.__init__"
    inside = {taken: module for module, taken in _used(root)} if _path(root).is_file() else {}
    origin = inside.get(name, base)
    return _file_of(origin, name) if origin != base else ""


def _path(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def _source(module: str) -> str:
    return _path(module).read_text(encoding="utf-8")
