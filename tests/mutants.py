"""Do the tests find mistakes? Each mistake of `mutants.txt` is made in a copy of the project, and
its tests are run there. There is a copy for each core.

    python tests/mutants.py              all: some twenty minutes on two cores (`make mutants`)
    python tests/mutants.py swap top-p   those with `swap` or `top-p` in their name or path

A mistake that no test finds has survived. It needs a test, or, if no user could notice it, another
mistake in its place. The first lines of the list say how it is written. A line that does not exist,
or that is not unique, is an error before any test runs.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.txt")
SECONDS = 300
"""Seconds of a mutant's tests. A mistake may make a test wait for ever: it counts as found."""


@dataclass(frozen=True)
class Mutant:
    """A mistake in one line."""

    name: str
    path: str
    function: str
    """Function or class; empty: the line is unique in the file."""
    before: str
    after: str
    tests: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]

    def in_text(self, text: str) -> str:
        """Return a file's text with the mistake in it.

        Raises:
            ValueError: the line does not exist, or is not unique.
        """
        lines = text.splitlines(keepends=True)
        spans = [(0, len(lines))]
        if self.function:
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            spans = [
                (node.lineno - 1, node.end_lineno or 0)
                for node in ast.walk(ast.parse(text))
                if isinstance(node, kinds) and node.name == self.function
            ]
        parts = ["".join(lines[first:end]) for first, end in spans]
        count = sum(part.count(self.before) for part in parts)
        if len(spans) != 1 or count != 1:
            raise ValueError(f"{self.name}: {len(spans)} places, in which it stands {count} times")
        changed = parts[0].replace(self.before, self.after)
        return "".join(lines[: spans[0][0]]) + changed + "".join(lines[spans[0][1] :])


def read_list(text: str) -> Iterator[Mutant]:
    """Yield the mistakes of a list; its first lines say how it is written."""
    tests: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines and lines[0].startswith("=="):
            tests = " ".join(lines[1:]).split()
        elif lines:
            name, place, before, after, *own = lines
            if before[:2] != "- " or after[:1] != "+":
                raise ValueError(f"{name}: a line of `- ` is followed by one of `+`")
            words = " ".join(own).split() or tests
            settings = [word for word in words if re.match(r"[A-Z_]+=", word)]
            path, _, function = place.partition("::")
            yield Mutant(
                name, path, function, before[2:], after[2:],
                tuple(word for word in words if word not in settings),
                tuple((key, value) for key, _, value in (word.partition("=") for word in settings)),
            )  # fmt: skip


def copy_tree(to: Path) -> None:
    """Copy all files that git tracks, or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(
    tree: Path, tests: tuple[str, ...], environment: tuple[tuple[str, str], ...]
) -> str | None:
    """Run tests in a tree. Returns the first that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"]
    variables = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "KERNEL_SEED": "0"}
    try:
        run = subprocess.run(
            [*command, "-q", "--tb=no", "-rfE", "--hypothesis-profile=mutants", *tests],
            cwd=tree,
            env={**os.environ, **variables, **dict(environment)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    if found is None and run.returncode > 0:  # a negative number: a signal has ended it
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-3000:]}")
    return found[1] if found else f"ended by signal {-run.returncode}"


def killer_of(mutant: Mutant, trees: Queue[Path]) -> str | None:
    """Make a mistake in a tree that no other mutant uses, run its tests, and undo it."""
    tree = trees.get()
    path, start = tree / mutant.path, time.perf_counter()
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.in_text(text), encoding="utf-8")
    try:
        killer = run_tests(tree, mutant.tests, mutant.environment)
    finally:
        path.write_text(text, encoding="utf-8")
        trees.put(tree)
    seconds = time.perf_counter() - start
    print(f"{seconds:4.0f} s  {mutant.name}: {killer or 'SURVIVED'}", flush=True)
    return killer


def main(parts: list[str]) -> int:
    """Run the mutants with one of these parts in their name or path; without parts, run all."""
    mutants = list(read_list(LIST.read_text(encoding="utf-8")))
    if parts:
        mutants = [m for m in mutants if any(part in f"{m.name} {m.path}" for part in parts)]
    for mutant in mutants:  # a line that is gone ends it here
        mutant.in_text((ROOT / mutant.path).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(os.cpu_count() or 1):
            copy_tree(tree := Path(folder, str(number)))
            trees.put(tree)
        for environment in sorted({mutant.environment for mutant in mutants}):
            tests = {t for m in mutants if m.environment == environment for t in m.tests}
            if failed := run_tests(tree, tuple(sorted(tests)), environment):
                print(f"{failed} fails as it is: mend that first")
                return 2
        with ThreadPoolExecutor(trees.qsize()) as threads:
            killers = list(threads.map(lambda each: killer_of(each, trees), mutants))
    survivors = [
        mutant
        for mutant, killer in zip(mutants, killers, strict=True)
        if killer is None and "(equivalent" not in mutant.name
    ]
    print(f"{len(mutants)} mistakes, {len(survivors)} not found")
    for mutant in survivors:
        print(f"  {mutant.name}: {mutant.path}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
