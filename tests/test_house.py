"""Rules of the house beside those on imports, which import-linter holds (`make lint`)."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from milestone_llm import MILESTONES

ROOT = Path(__file__).parents[1]


# --- the lesson names no extra -------------------------------------------------------------------

PROGRAMS = {"config.py", "engine.py", "bench.py", "demo.py", "walkthrough.py", "serve.py"}
LESSON = [
    *(path for path in ROOT.glob("m5_kernels/*.py") if path.name not in PROGRAMS),
    *ROOT.glob("m5_kernels/decoder/*.py"),
    *ROOT.glob("m5_kernels/kernels/*.py"),
]
"""M5 but for the engine, which chooses extras, and the fields and programs that ask for them."""
EXTRAS = r"\b(int8|hopper|tensor_parallel|guess(es)?|draft_token_ids|proposer)\b"
CORE = list(ROOT.glob("milestone_llm/core/*.py"))
OF_LATER_MILESTONES = r"guess|draft|speculat|\bforks?\b|\branks\b"


@pytest.mark.parametrize(("files", "names"), [(LESSON, EXTRAS), (CORE, OF_LATER_MILESTONES)])
def test_code_names_nothing_that_is_not_its_matter(files, names):
    """In comments and docstrings it may."""
    assert len(files) > 10
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(value="")
        assert not re.search(names, ast.unparse(tree)), path


# --- what every milestone offers -----------------------------------------------------------------


@pytest.mark.parametrize("milestone", MILESTONES)
def test_every_root_offers_the_same_names(milestone):
    root = importlib.import_module(milestone)
    names = {"LLMEngine", "EngineConfig", "SamplingParams", "RequestOutput"}
    assert names <= set(root.__all__)
    assert all(hasattr(root, name) for name in root.__all__)
    assert root.LLMEngine.milestone == milestone
    assert importlib.import_module(f"{milestone}.engine").EngineConfig is root.EngineConfig


def test_a_field_of_a_config_is_the_same_in_all_later_milestones():
    configs = [importlib.import_module(milestone).EngineConfig for milestone in MILESTONES]
    for lower, higher in pairwise(configs):
        kept = {field.name: (field.type, field.default) for field in fields(higher)}
        own = {field.name: (field.type, field.default) for field in fields(lower)}
        assert own.items() <= kept.items()
        assert list(kept)[: len(own)] == list(own), "in the order in which they came"
