"""What does a part of the engine do? Its code, without docstrings.

`python -m docs.questions.show_code milestone_llm/core/engine_core.py EngineCore.step` prints one
function. Several functions, and several files, may follow each other.
"""

import ast
import sys
from pathlib import Path

lines: list[str] = []
tree: ast.AST = ast.Module([], [])
for word in sys.argv[1:]:
    if word.endswith(".py"):
        text = Path(word).read_text(encoding="utf-8")
        lines, tree = text.splitlines(), ast.parse(text)
        print(f"# {word}")
        continue
    node = tree
    for name in word.split("."):
        node = next(each for each in ast.walk(node) if getattr(each, "name", "") == name)
    assert isinstance(node, ast.FunctionDef)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    body = node.body[1 if ast.get_docstring(node) else 0 :]
    # Lines up to the colon; comments above the first statement; then the rest.
    start = (node.body[0].end_lineno or 0) if ast.get_docstring(node) else node.body[0].lineno - 1
    code = lines[first - 1 : node.body[0].lineno - 1] + lines[start : body[-1].end_lineno]
    print("\n".join(code), end="\n\n")
