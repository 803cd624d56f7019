"""What kernels do before they wait for those before them, by their text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from m5_kernels.kernels import backend

CONSTANT = {"weight", "words", "bias", "scale", "q_norm", "k_norm", "cos_sin"}
CONSTANT |= {"weight_boxes", "word_boxes"}
OF_THE_STEP = {"positions", "slot_mapping", "context_lens", "offsets", "block_table"}
OF_THE_STEP |= {"rows", "temperature", "seeds"}
"""Written by kernels that end before the first of those starts which start early."""
NUMBERS = {"size", "out_size", "num_seqs", "window", "corner", "tiles", "steps"}
SHARED = {"ring"}
"""Memory of the program itself."""
LEAVES = {"_flash_decode_kernel": "worker >= num_workers"}
"""Kernels some programs of which have nothing to do, and when: never the first one, which waits."""
FOLDER = Path(backend.__file__).parent


def early_kernels() -> dict[str, ast.FunctionDef]:
    """Kernels that wait for the one before, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(map(waits, node.body)):
                found[f"{path.stem}: {node.name}"] = node
    return found


def waits(statement: ast.stmt) -> bool:
    return "wait_for_previous(" in ast.unparse(statement)


def before_the_wait(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in the order of the text, those of the block that waits included."""
    for statement in body:
        if waits(statement):
            yield from before_the_wait(getattr(statement, "body", []))
            return
        yield statement


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


KERNELS = early_kernels()


def test_there_are_such_kernels() -> None:
    wanted = {"_register_linear_kernel", "_dot_linear_kernel", "_flash_decode_kernel"}
    wanted |= {"_rope_kv_write_kernel", "_rms_norm_kernel", "_score_chunk_kernel"}
    assert wanted <= {kernel.name for kernel in KERNELS.values()}
    assert {"hopper_linear: _copy", "hopper_int8: _copy"} <= KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_before_it_waits_a_kernel_reads_only_what_is_there_and_writes_nothing(name: str) -> None:
    kernel = KERNELS[name]
    parameters = {argument.arg for argument in kernel.args.args}
    of: dict[str, set[str]] = {parameter: {parameter} for parameter in parameters}
    for statement in before_the_wait(kernel.body):
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            assert isinstance(statement, ast.If)
            assert ast.unparse(statement.test) == LEAVES.get(kernel.name)
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            assert not re.search("store|atomic", called), ast.unparse(call)
            if "load" in called or "copy" in called:
                read = set().union(*(of.get(each, set()) for each in names(call)))
                read = {each for each in read if not each.isupper() and "_stride" not in each}
                assert read <= CONSTANT | OF_THE_STEP | NUMBERS | SHARED, ast.unparse(call)
        for assigned in (node for node in ast.walk(statement) if isinstance(node, ast.Assign)):
            origins = set().union(*(of.get(each, set()) for each in names(assigned.value)))
            of |= dict.fromkeys(set().union(*map(names, assigned.targets)), origins)
