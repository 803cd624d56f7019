"""When kernels may start: who says it, and by their text what they do before they wait."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import m5_kernels.kernels
from m5_kernels import extras
from m5_kernels.kernels.early_start import EARLY, LATE, NEVER, launch_options, next_starts

CONSTANT = {"weight", "words", "bias", "scale", "q_norm", "k_norm", "cos_sin"}
CONSTANT |= {"weight_boxes", "word_boxes"}
OF_THE_STEP = {"positions", "slot_mapping", "context_lens", "offsets", "block_table"}
OF_THE_STEP |= {"rows", "temperature", "seeds"}
"""Written by kernels that end before the first of those starts which start early."""
NUMBERS = {"size", "out_size", "num_seqs", "window", "corner", "tiles", "steps"}
SHARED = {"ring"}
"""Memory of the program itself."""
LEAVES = dict.fromkeys(("_flash_decode_kernel", "_attend_guesses_kernel"), "worker >= num_workers")
"""Kernels some programs of which have nothing to do, and when: never the first one, which waits."""
FOLDERS = [*map(Path, m5_kernels.kernels.__path__), *map(Path, extras.__path__)]


FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))


def early_kernels() -> dict[str, ast.FunctionDef]:
    """Kernels that wait for the one before, by name."""
    found = {}
    for path in FILES:
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
    wanted |= {"_attend_guesses_kernel"}
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


def launches() -> Iterator[tuple[ast.FunctionDef, str]]:
    """Kernels, each with the keywords of a launch of its file, written out."""
    for path in FILES:
        functions = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        kernels = {each.name: each for each in functions if each.name.endswith("_kernel")}
        for launcher in functions:
            texts = {
                ast.unparse(node.targets[0]): ast.unparse(node.value)
                for node in ast.walk(launcher)
                if isinstance(node, ast.Assign)
            }
            for call in (node for node in ast.walk(launcher) if isinstance(node, ast.Call)):
                name = ast.unparse(getattr(call.func, "value", call))
                if isinstance(call.func, ast.Subscript) and name in kernels:
                    keywords = [ast.unparse(each) for each in call.keywords]
                    keywords += [texts.get(each.removeprefix("**"), "") for each in keywords]
                    yield kernels[name], " ".join(keywords)


def test_a_launch_says_when_the_next_kernel_starts_to_those_that_wait() -> None:
    """And to no other: it would start early, and read what is not there yet."""
    seen = set()
    for kernel, keywords in launches():
        seen.add(kernel.name)
        knows = any(argument.arg == "PDL" for argument in kernel.args.args)
        assert keywords.count("launch_options(") == knows, kernel.name
        assert "PDL" not in keywords, kernel.name
        assert "launch_pdl" not in keywords, kernel.name
    assert {"_rms_norm_kernel", "_hopper_linear_kernel", "_paged_prefill_kernel"} <= seen


def test_who_launches_is_told_what_is_said_around_it() -> None:
    assert launch_options() == {"PDL": NEVER}
    with next_starts(EARLY):
        assert launch_options() == {"PDL": EARLY, "launch_pdl": True}
        assert launch_options(most=LATE) == {"PDL": LATE, "launch_pdl": True}
        assert launch_options(waits_for_launch=True) == {"PDL": EARLY}
        with next_starts(LATE):
            assert launch_options() == {"PDL": LATE, "launch_pdl": True}
        assert launch_options()["PDL"] == EARLY
        with ThreadPoolExecutor() as pool:  # launches the kernels of another engine
            assert pool.submit(launch_options).result() == {"PDL": NEVER}
    with pytest.raises(KeyboardInterrupt), next_starts(LATE):
        raise KeyboardInterrupt
    assert launch_options() == {"PDL": NEVER}
