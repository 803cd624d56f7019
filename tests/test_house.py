"""Rules of the house beside those on imports, which import-linter holds (`make lint`)."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.forked import run_python
from milestone_llm import MILESTONES

ROOT = Path(__file__).parents[1]


def test_the_page_names_every_variable_of_the_environment_that_is_read():
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    read = re.compile(r"environ(?:\.get\(|\.setdefault\(|\[)\"([A-Z_]+)\"")
    files = [
        path for name in ("milestone_llm", *MILESTONES) for path in (ROOT / name).rglob("*.py")
    ]
    names = {name for path in files for name in read.findall(path.read_text(encoding="utf-8"))}
    assert len(names) > 8
    assert {name for name in names if f"`{name}" not in page} == set()


# --- the lesson names no extra -------------------------------------------------------------------

PROGRAMS = {"bench.py", "demo.py", "walkthrough.py", "serve.py"}
LESSON = [
    *(
        path
        for path in ROOT.glob("m5_kernels/*.py")
        if path.name not in {*PROGRAMS, "backends.py", "config.py"}
    ),
    *ROOT.glob("m5_kernels/decoder/*.py"),
    *ROOT.glob("m5_kernels/kernels/*.py"),
]
"""M5 without `backends.py`, which chooses extras, and the fields and programs that ask for one."""
EXTRAS = (
    r"\b(int8|gguf|hopper|experts|tensor_parallel|guess(es)?|draft_token_ids|proposer"
    r"|spec_decode)\b"
)
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


def test_only_the_chooser_of_backends_imports_an_extra():
    importing = {
        path.name
        for path in (*ROOT.glob("m5_kernels/*.py"), *LESSON)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom) and "extras" in ast.unparse(node)
    }
    assert importing == {"backends.py"}


ENGINE_ON_A_CPU = """
import os, sys
for name in list(sys.modules):  # this process was forked from one that has imported all of them
    if name.split(".")[0] == "m5_kernels":
        del sys.modules[name]
before = dict(os.environ)
import torch, triton
launch = triton.JITFunction.__getitem__
from m5_kernels import LLMEngine
from milestone_llm.models.tiny_models import build_tiny_model
LLMEngine(build_tiny_model("llama"), device="cpu", max_model_len=32).generate([1, 2, 3])
assert triton.JITFunction.__getitem__ is launch
changed = {name for name, _ in os.environ.items() ^ before.items()}
assert not [name for name in changed if not name.startswith("TORCH")], changed  # torch's own
loaded = (name.split(".") for name in sys.modules if name.startswith("m5_kernels.extras."))
print(*sorted(".".join(name[2:]) for name in loaded))
"""


def test_an_engine_on_a_cpu_loads_no_other_extra_and_changes_nothing_else(tmp_path):
    pytest.importorskip("triton")
    program = tmp_path / "engine_on_a_cpu.py"
    program.write_text(ENGINE_ON_A_CPU)
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    names = ["devices", *(f"devices.cpu_{name}" for name in ("attention", "linear", "ops"))]
    assert done.stdout.split() == names


def test_a_class_has_one_base_at_most():
    """Configurations, which are data, are a chain; argparse's formatters and vLLM's schedulers are
    mixed as these want."""
    files = [
        path for name in (*MILESTONES, "milestone_llm") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    assert len(files) > 200
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(each) for each in node.bases]
                own = [each for each in bases if not each.startswith("argparse.")]
                assert len(own) <= 1 or own[1:] == ["AsyncScheduler"], path


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


# --- an import changes nothing, and needs little -------------------------------------------------

BARE_PYTHON = """
import importlib, os, sys

class NothingInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {ours} | sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NothingInstalled())
before = dict(os.environ), sys.excepthook, list(sys.path)
programs = {{name: importlib.import_module(name) for name in {programs}}}
for name in {light}:
    importlib.import_module(name)
assert (dict(os.environ), sys.excepthook, list(sys.path)) == before
try:
    from m3_paged import LLMEngine
except ModuleNotFoundError as error:
    print(error, file=sys.stderr)
sys.exit(programs["m3_paged.demo"].main([]))
"""
PROGRAMS_OF_ALL = [
    *(f"{name}.{program}" for name in MILESTONES for program in ("demo", "bench", "serve")),
    *(f"{name}.walkthrough" for name in MILESTONES),
    *("m1_single.timeline", "m4_prefix_chunked.tools.stress", "milestone_llm.lab.bench.serving"),
    *("milestone_llm.__main__", "milestone_llm.lab.playground.__main__"),
    "milestone_llm.lab.explorer.__main__",
    *("milestone_llm.serving.timed", "exercises.build.__main__", "exercises.museum.__main__"),
]
WITH_TENSORS = {"logprobs", "philox", "prompt_logprobs", "sampling"}
LIGHT = [
    *MILESTONES,
    *(f"milestone_llm.core.{path.stem}" for path in CORE if path.stem not in WITH_TENSORS),
    *(f"{name}.scheduler" for name in MILESTONES if name != "m5_kernels"),
]


def test_an_import_changes_nothing_and_what_is_missing_is_said():
    """By a ModuleNotFoundError in a library, by one line in a program."""
    ours = {*MILESTONES, "milestone_llm", "exercises"}
    program = BARE_PYTHON.format(ours=ours, programs=PROGRAMS_OF_ALL, light=LIGHT)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 2, done.stderr
    assert all("is not installed" in line and "make setup" in line for line in lines)
