"""What does a milestone's scheduler change in the one below? Their code, compared.

`python -m docs.questions.scheduler_diff m2_batching m3_paged` prints the unified diff of the two
`scheduler.py`, without imports, docstrings and comments. Names of functions after the packages
leave only those functions.
"""

import argparse
import ast
import difflib
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("below", help="package of the milestone below, such as m2_batching")
parser.add_argument("above", help="package of the milestone that changes it, such as m3_paged")
parser.add_argument("functions", nargs="*", help="only these functions")
options = parser.parse_args()


def code_lines(path: Path) -> list[str]:
    """The code of the file's functions, as it is written, an empty line after each."""
    text = path.read_text(encoding="utf-8")
    lines, nodes, kept = text.splitlines(), list(ast.walk(ast.parse(text))), []
    notes = set()  # the numbers of lines that are docstrings
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            notes |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    for node in nodes:
        if not isinstance(node, ast.FunctionDef):
            continue
        if options.functions and node.name not in options.functions:
            continue
        numbers = [n for n in range(node.lineno, (node.end_lineno or 0) + 1) if n not in notes]
        code = [lines[number - 1].partition("  # ")[0].rstrip() for number in numbers]
        kept += [line for line in code if line and not line.lstrip().startswith("#")] + [""]
    return kept


paths = [Path(package, "scheduler.py") for package in (options.below, options.above)]
below, above = (code_lines(path) for path in paths)
old, new = (path.as_posix() for path in paths)
for line in difflib.unified_diff(below, above, old, new, n=2, lineterm=""):
    print(line.rstrip())
