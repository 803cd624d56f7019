"""Which files are the engines: `python -m milestone_llm.lab.walkthrough.engine_map`

What an engine imports inside this project, and what those import. Of that, a step runs what lies in
the folders of the milestones and in milestone_llm/engine/; milestone_llm/models/ loads a model,
milestone_llm/lab/trace/ keeps records. All other files are instruments.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from milestone_llm import MILESTONES

ROOT = Path(__file__).parents[2]
ROOM = "milestone_llm/engine"
Folders = dict[str, dict[str, int]]
"""Lines of each file, by folder."""


def engine_map(module: str) -> Folders:
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
    folders: Folders = {}
    for name in sorted(found, key=lambda name: (name.split(".")[0] != module.split(".")[0], name)):
        folder, _, stem = name.replace(".", "/").rpartition("/")
        folders.setdefault(folder, {})[stem] = _source(name).count("\n")
    return folders


def split(folders: Folders) -> tuple[Folders, Folders]:
    """What a step runs, and what is around it."""
    core = {
        folder: files
        for folder, files in folders.items()
        if folder == ROOM or folder.startswith(MILESTONES)
    }
    return core, {folder: files for folder, files in folders.items() if folder not in core}


def size(folders: Mapping[str, Mapping[str, int]]) -> str:
    """`1,234 lines in 5 files`."""
    counts = [count for files in folders.values() for count in files.values()]
    return f"{sum(counts):,} lines in {len(counts)} files"


def listed(folders: Mapping[str, Mapping[str, int]], width: int) -> Iterator[str]:
    """Lines of text: each folder with its files."""
    for folder, files in folders.items():
        names = ", ".join(f"{name}.py\N{NO-BREAK SPACE}{count}" for name, count in files.items())
        for line in textwrap.wrap(
            f"{folder}/: {names}", width, initial_indent="  ", subsequent_indent="    "
        ):
            yield line.replace("\N{NO-BREAK SPACE}", " ")


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


def main() -> int:
    """Print the files of all five engines, and how much else there is. Returns the exit status."""
    maps = [split(engine_map(f"{milestone}.engine"))[0] for milestone in MILESTONES]
    folders: Folders = {ROOM: {}}
    for each in maps:
        for folder, files in each.items():
            folders.setdefault(folder, {}).update(files)
    print(f"The five engines, {size(folders)}:")
    print(*listed(folders, 80), sep="\n")
    floors = ("milestone_llm", *MILESTONES)
    rest: Folders = {}
    for path in sorted(path for floor in floors for path in (ROOT / floor).rglob("*.py")):
        folder = path.parent.relative_to(ROOT).as_posix()
        if path.stem not in folders.get(folder, {}):
            rest.setdefault(folder, {})[path.stem] = path.read_text("utf-8").count("\n")
    print(f"Around them, {size(rest)}: they load models, and show, measure and serve.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
