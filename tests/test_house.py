"""Rules of the house beside those on imports, which import-linter holds (`make lint`)."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from engine_helpers import tiny_model
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


# --- what one walks through ----------------------------------------------------------------------


def stack_at(name: str, work: Callable[[], object]) -> list[str]:
    """Files on the stack at the first call of `name`, from this project's `step` on."""
    found: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == name and not found:
            walk: Any = frame
            while walk is not None:
                found.insert(0, (walk.f_code.co_filename, walk.f_code.co_name))
                walk = walk.f_back

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    first = next(i for i, (_, function) in enumerate(found) if function == "step")
    return [path for path, _ in found[first:]]


def engine_of(milestone: str) -> Any:
    """A tiny engine with one request."""
    package = importlib.import_module(milestone)
    engine = package.LLMEngine(tiny_model(), max_num_seqs=2, max_model_len=32)
    engine.add_request([1, 2, 3], package.SamplingParams(temperature=0, max_tokens=4))
    return engine


@pytest.mark.parametrize("milestone", MILESTONES)
def test_the_readmes_four_frames_lead_from_a_step_to_its_schedule(milestone):
    assert len(stack_at("schedule", engine_of(milestone).step)) == 4


def test_one_walks_from_the_runner_to_the_kernel_without_a_detour():
    with mock.patch("m5_kernels.engine.runs_no_kernels", return_value=False):
        engine = engine_of("m5_kernels")
    engine.step()  # the prompt
    stack = dict.fromkeys(map(Path, stack_at("flash_decode", engine.step)))
    of_m5 = [path.stem for path in stack if "m5_kernels" in path.parts]
    assert of_m5 == ["runner", "device_step", "decoder", "attention", "flash_decode"]


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
