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
    lines, kept = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        if options.functions and node.name not in options.functions:
            continue
        statements = node.body[1:] if ast.get_docstring(node) else node.body
        code = lines[node.lineno - 1 : node.body[0].lineno - 1]  # the signature
        code += lines[statements[0].lineno - 1 : node.end_lineno] if statements else []
        without_comments = [line.partition("  # ")[0].rstrip() for line in code]
        kept += [x for x in without_comments if x and not x.lstrip().startswith("#")] + [""]
    return kept


paths = [Path(package, "scheduler.py") for package in (options.below, options.above)]
below, above = (code_lines(path) for path in paths)
old, new = (path.as_posix() for path in paths)
for line in difflib.unified_diff(below, above, old, new, n=2, lineterm=""):
    print(line.rstrip())
