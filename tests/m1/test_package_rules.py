"""Rules that keep the ladder a ladder: who may import whom, and what every rung offers."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("m[1-5]_*/__init__.py"))
ENGINES = [package for package in PACKAGES if (package / "engine.py").exists()]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in PACKAGES
    for path in package.rglob("*.py")
}
"""Path of each module by its dotted name; a package's root ends in `.__init__`."""

TENSOR_LIBRARIES = {"torch", "transformers", "triton", "numpy"}
PURE = re.compile(
    r"m\d_\w+\.(scheduler|plan|request|config|sampling_params|tracer"
    r"|request_queue|slot_manager|block_pool|block_table|block_manager|kv_cache_manager"
    r"|prefix_cache)"
)
"""Modules that decide and keep books: they know requests, tokens and blocks, and no tensors."""


def imports_of(module: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere, except for type checking alone."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:  # `from .package import module` or `from .module import name`
                inner = f"{base}.{alias.name}"
                yield inner if inner in FILES else base


def _base(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    return ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_milestone_imports_from_lower_ones_only(package):
    for module in (module for module in FILES if module.startswith(package.name + ".")):
        for imported in imports_of(module):
            root = imported.split(".")[0]
            is_ours = re.match(r"m\d_", root)
            assert not is_ours or root <= package.name, f"{module} imports {imported}"


@pytest.mark.parametrize("module", [module for module in FILES if PURE.fullmatch(module)])
def test_schedulers_and_managers_import_no_tensors_not_even_through_others(module):
    """Followed through all modules of this project, but not through the roots of packages."""
    pending, seen = [module], {module}
    while pending:
        current = pending.pop()
        for imported in imports_of(current):
            library = imported.split(".")[0]
            assert library not in TENSOR_LIBRARIES, f"{module}: {current} imports {imported}"
            if imported in FILES and imported not in seen:
                seen.add(imported)
                pending.append(imported)


def test_kernels_import_no_engine():
    for module in (module for module in FILES if ".kernels." in module):
        for imported in imports_of(module):
            assert not imported.endswith((".engine", ".scheduler", ".runner")), module


@pytest.mark.parametrize("package", ENGINES, ids=lambda package: package.name)
def test_every_root_offers_the_same_names(package):
    root = importlib.import_module(package.name)
    names = {"LLMEngine", "EngineConfig", "SamplingParams", "RequestOutput"}
    assert names <= set(root.__all__)
    assert all(hasattr(root, name) for name in root.__all__)
    assert root.LLMEngine.milestone == package.name
    assert root.LLMEngine.config_class is root.EngineConfig


def test_parts_shared_by_all_are_one_class():
    roots = [importlib.import_module(package.name) for package in ENGINES]
    assert len({root.SamplingParams for root in roots}) == 1
    assert len({root.RequestOutput for root in roots}) == 1
    for lower, higher in pairwise(roots):
        assert issubclass(higher.EngineConfig, lower.EngineConfig)
        assert issubclass(higher.LLMEngine, lower.LLMEngine)


def test_the_rules_see_what_they_are_to_forbid():
    """The engine imports torch through its runner; a rule blind to that would hold nothing."""
    assert "m1_single.runner" in set(imports_of("milestone_llm.engine.engine"))
    assert "torch" in set(imports_of("m1_single.runner"))
    assert "milestone_llm.engine.plan" in set(imports_of("m2_batching.scheduler"))
    assert "milestone_llm.engine.detokenizer" not in set(imports_of("milestone_llm.engine.request"))
    assert {
        "m1_single.scheduler",
        "milestone_llm.engine.request_queue",
        "m2_batching.slot_manager",
    } <= {module for module in FILES if PURE.fullmatch(module)}
