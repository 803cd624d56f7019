"""What makes M4's schedule run one step ahead of the tokens? The functions, without docstrings."""

import ast
import inspect
import textwrap
from collections.abc import Callable

from m5_kernels.engine import LLMEngine
from milestone_llm.engine.loop import StepLoop
from milestone_llm.engine.request import Request
from milestone_llm.engine.scheduler import BaseScheduler


def show(function: Callable[..., object] | None) -> None:
    """Print a function's file and code."""
    assert function is not None
    lines = inspect.getsource(function).splitlines()
    (node,) = ast.parse(textwrap.dedent("\n".join(lines))).body
    assert isinstance(node, ast.FunctionDef)
    first = node.body[1 if ast.get_docstring(node) else 0].lineno - 1
    print(f"# {function.__module__.replace('.', '/')}.py")
    print("\n".join(lines[: node.body[0].lineno - 1] + lines[first:]), end="\n\n")


for member in (Request.num_tokens, Request.num_uncomputed_tokens):
    show(member.fget)
show(BaseScheduler.mark_launched)
show(LLMEngine.num_steps_ahead.fget)
show(StepLoop._step)
