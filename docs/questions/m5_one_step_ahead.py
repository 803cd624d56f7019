"""What makes M4's schedule run one step ahead of the tokens? The functions, without docstrings."""

import ast
import inspect
import textwrap

from m5_kernels.engine import LLMEngine
from milestone_llm.core.engine_core import StepLoop
from milestone_llm.core.request import Request
from milestone_llm.core.scheduler import BaseScheduler


def show(owner: type, *names: str) -> None:
    """Print a class's file, and the code of some of its functions and properties."""
    print(f"# {owner.__module__.replace('.', '/')}.py")
    for name in names:
        member = vars(owner)[name]
        lines = inspect.getsource(getattr(member, "fget", member)).splitlines()
        (node,) = ast.parse(textwrap.dedent("\n".join(lines))).body
        assert isinstance(node, ast.FunctionDef)
        first = node.body[1 if ast.get_docstring(node) else 0].lineno - 1
        print("\n".join(lines[: node.body[0].lineno - 1] + lines[first:]), end="\n\n")


show(Request, "num_tokens", "num_uncomputed_tokens")
show(BaseScheduler, "mark_launched")
show(LLMEngine, "num_steps_ahead")
show(StepLoop, "_step")
