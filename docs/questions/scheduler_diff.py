"""What does a milestone's scheduler change in the one before? Its functions, changed lines marked.

`python -m docs.questions.scheduler_diff m2_batching m3_paged` prints M3's `scheduler.py` without
imports, docstrings and comments. `+` marks lines that are not in M2's function of that name, `-`
lines of M2's that are gone. With names of functions after the packages, only those are printed.
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


def functions(package: str) -> dict[str, list[str]]:
    """Return the code of a scheduler's functions, as it is written, by name."""
    text = Path(package, "scheduler.py").read_text(encoding="utf-8")
    lines, nodes, found = text.splitlines(), list(ast.walk(ast.parse(text))), {}
    notes = set()  # numbers of docstring lines
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            notes |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            numbers = [n for n in range(node.lineno, (node.end_lineno or 0) + 1) if n not in notes]
            code = [lines[number - 1].partition("  # ")[0].rstrip() for number in numbers]
            found[node.name] = [x for x in code if x and not x.lstrip().startswith("#")]
    return found


below, above = functions(options.below), functions(options.above)
for name in options.functions or above:
    for line in difflib.ndiff(below.get(name, []), above[name]):
        if line[0] != "?":  # ndiff's own hints
            print(line)
    print()
gone = [name for name in below if name not in above]
if gone:
    print(f"no longer there: {', '.join(gone)}")
