"""The rules of the house: who may import whom, what a folder shows, how deep classes go."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = "milestone_llm"
MILESTONES = ["m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels"]
FLOORS = [GROUND, *MILESTONES]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for floor in FLOORS
    for path in (ROOT / floor).rglob("*.py")
}
"""Path of each module by its dotted name; a package's root ends in `.__init__`."""

DOORS = {"demo", "walkthrough", "bench", "serve"}
MAX_DOOR_LINES = 100
SEAMS = re.compile(
    r"milestone_llm\.engine\.(protocols|plan|kv|outbox|request|request_queue|scheduler)"
    r"|m\d_\w+\.(scheduler|regions|block_pool|block_manager|preemption|caching_pool|prefix_cache)"
)
"""Modules where engine, scheduler, runner and KV managers meet."""
PURE = re.compile(
    SEAMS.pattern + r"|milestone_llm\.engine\.(outputs|config|sampling_params)"
    r"|milestone_llm\.engine\.block_hash|milestone_llm\.serving\.router"
    r"|milestone_llm\.trace\.records|m\d_\w+\.(config|kv_usage)"
)
"""Modules that decide and keep books: they know requests, tokens and blocks, and no tensors."""
TENSOR_LIBRARIES = {"torch", "transformers", "triton", "numpy"}


def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere, inside functions too.

    What is imported for type checking alone is left out: nothing of it runs.
    """
    tree = tree_of(module)
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
            yield from (as_file(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            for alias in node.names:  # `from .package import module` or `from .module import name`
                inner = f"{base}.{alias.name}"
                yield as_file(inner if inner in FILES or is_package(inner) else base)


def is_package(name: str) -> bool:
    """Whether a dotted name is one of our packages."""
    return f"{name}.__init__" in FILES


def as_file(name: str) -> str:
    """The module that is loaded for a name: a package's root is its `__init__`."""
    return f"{name}.__init__" if is_package(name) else name


GRAPH = {module: {name for name in imports_of(module) if name in FILES} for module in FILES}
"""For each module of ours, those that it imports."""


def reachable(start: str) -> set[str]:
    """What a module imports, directly or through others, itself included."""
    seen, pending = {start}, [start]
    while pending:
        new = GRAPH[pending.pop()] - seen
        seen |= new
        pending += new
    return seen


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The names of one circle, or an empty list."""
    state: dict[str, int] = {}

    def visit(node: str, path: list[str]) -> list[str]:
        if state.get(node) == 2:
            return []
        if node in path:
            return path[path.index(node) :]
        for follower in sorted(graph.get(node, ())):
            if found := visit(follower, [*path, node]):
                return found
        state[node] = 2
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def room_of(module: str) -> str:
    """The folder that a module lies in: `milestone_llm.engine`, `m5_kernels.kernels`.

    The doors of a milestone, which lead to its engine and to its tools, count as one of their own.
    """
    folder, _, name = module.rpartition(".")
    return f"{folder}.doors" if folder in MILESTONES and name in DOORS else folder


# --- rule 1: arrows point down -------------------------------------------------------------------


@pytest.mark.parametrize("module", FILES)
def test_a_floor_imports_from_itself_and_from_lower_ones_only(module):
    own = FLOORS.index(module.split(".")[0])
    for imported in GRAPH[module]:
        assert FLOORS.index(imported.split(".")[0]) <= own, f"{module} imports {imported}"


@pytest.mark.parametrize("room", ["engine", "models"])
def test_engine_and_models_know_nothing_of_those_who_watch_them(room):
    inside = (f"{GROUND}.engine.", f"{GROUND}.models.", f"{GROUND}.__init__")
    for module in (module for module in FILES if module.startswith(f"{GROUND}.{room}.")):
        for imported in GRAPH[module]:
            assert imported.startswith(inside), f"{module} imports {imported}"


def test_there_is_no_circle_among_files():
    assert circle_in(GRAPH) == []


def test_there_is_no_circle_among_folders():
    rooms: dict[str, set[str]] = {}
    for module, imported in GRAPH.items():
        targets = {room_of(name) for name in imported if not name.endswith(".__init__")}
        rooms.setdefault(room_of(module), set()).update(targets - {room_of(module)})
    assert circle_in(rooms) == []


@pytest.mark.parametrize("module", [module for module in FILES if PURE.fullmatch(module)])
def test_schedulers_and_managers_import_no_tensors_not_even_through_others(module):
    for inner in reachable(module):
        libraries = {name.split(".")[0] for name in imports_of(inner)}
        assert not libraries & TENSOR_LIBRARIES, f"{module} loads tensors through {inner}"


def test_kernels_import_no_engine():
    for module in (module for module in FILES if ".kernels." in module):
        for imported in GRAPH[module]:
            assert not imported.endswith((".engine", ".scheduler", ".runner")), module


# --- rule 2: a milestone's folder shows what its step runs, and its doors ------------------------


def top_level(milestone: str) -> set[str]:
    """Names of the files that one sees on opening the folder."""
    return {path.stem for path in (ROOT / milestone).glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("milestone", MILESTONES)
def test_a_folder_shows_the_engine_and_four_doors(milestone):
    engine = reachable(f"{milestone}.engine")
    for name in top_level(milestone) - DOORS:
        assert f"{milestone}.{name}" in engine, f"no step of {milestone} runs {name}.py"


@pytest.mark.parametrize("milestone", MILESTONES)
def test_the_engine_loads_no_instruments(milestone):
    watching = {f"{GROUND}.{room}" for room in ("plots", "bench", "demo", "walkthrough")}
    for module in reachable(f"{milestone}.engine"):
        assert room_of(module) not in watching, module
        assert ".tools." not in module, module


@pytest.mark.parametrize("milestone", MILESTONES)
def test_doors_are_short(milestone):
    for name in sorted(top_level(milestone) & DOORS):
        lines = FILES[f"{milestone}.{name}"].read_text(encoding="utf-8").splitlines()
        assert len(lines) <= MAX_DOOR_LINES, f"{name}.py has {len(lines)} lines"


@pytest.mark.parametrize("milestone", MILESTONES)
def test_folders_below_have_the_same_name_everywhere(milestone):
    folders = {path.parent.name for path in (ROOT / milestone).glob("*/*.py")}
    assert folders <= {"tools", "kernels"}


# --- rules 3 to 5: whole schedulers, one base class, no blank types where parts meet --------------


@pytest.mark.parametrize("milestone", MILESTONES)
def test_engine_scheduler_and_runner_have_one_base_at_most(milestone):
    for module in reachable(f"{milestone}.engine"):
        for _, found in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            if found.__name__.endswith(("Engine", "Scheduler", "Runner")):
                ours = [base for base in found.__mro__ if base.__module__.split(".")[0] in FLOORS]
                assert len(ours) <= 2, f"{found.__qualname__}: {ours}"


@pytest.mark.parametrize("milestone", MILESTONES[:4])
def test_a_scheduler_is_one_file_to_be_read_alone(milestone):
    module = f"{milestone}.scheduler"
    num_lines = len(FILES[module].read_text(encoding="utf-8").splitlines())
    assert 100 <= num_lines <= 200
    others = [name for name in GRAPH[module] if name.endswith(".scheduler")]
    assert others == [f"{GROUND}.engine.scheduler"]


def test_the_step_loop_is_written_once():
    loop = {"step", "generate", "stream", "abort", "_run", "add_request"}
    for milestone in MILESTONES:
        engine = importlib.import_module(f"{milestone}.engine").LLMEngine
        assert not loop & set(vars(engine)), milestone
        assert engine.__mro__[1].__module__ == f"{GROUND}.engine.engine"


def test_nothing_is_said_to_be_as_before():
    texts = {module: path.read_text(encoding="utf-8") for module, path in FILES.items()}
    assert not [module for module, text in texts.items() if "as before" in text.lower()]
    assert not [module for module, text in texts.items() if "type: ignore[assignment" in text]


def names_in(annotations: Iterable[ast.expr | None]) -> set[str]:
    """All names that occur in some annotations."""
    return {
        node.id
        for annotation in annotations
        if annotation is not None
        for node in ast.walk(annotation)
        if isinstance(node, ast.Name)
    }


@pytest.mark.parametrize("module", [module for module in FILES if SEAMS.fullmatch(module)])
def test_there_is_no_any_where_the_parts_meet(module):
    for node in ast.walk(tree_of(module)):
        annotations: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef) and node.name != "stats":  # figures of any kind
            arguments = node.args.args + node.args.kwonlyargs
            annotations = [node.returns, *(argument.annotation for argument in arguments)]
        elif isinstance(node, ast.AnnAssign):
            annotations = [node.annotation]
        assert "Any" not in names_in(annotations), f"{module}, line {node.lineno}"


# --- what every milestone offers -----------------------------------------------------------------


@pytest.mark.parametrize("milestone", MILESTONES)
def test_every_root_offers_the_same_names(milestone):
    root = importlib.import_module(milestone)
    names = {"LLMEngine", "EngineConfig", "SamplingParams", "RequestOutput"}
    assert names <= set(root.__all__)
    assert all(hasattr(root, name) for name in root.__all__)
    assert root.LLMEngine.milestone == milestone
    assert root.LLMEngine.config_class is root.EngineConfig


def test_parts_shared_by_all_are_one_class():
    roots = [importlib.import_module(milestone) for milestone in MILESTONES]
    assert len({root.SamplingParams for root in roots}) == 1
    assert len({root.RequestOutput for root in roots}) == 1
    for lower, higher in pairwise(roots):
        assert issubclass(higher.EngineConfig, lower.EngineConfig)


def test_the_rules_see_what_they_are_to_forbid():
    """A rule that sees no imports, circles or classes would hold nothing."""
    assert "torch" in set(imports_of("m1_single.runner"))
    assert f"{GROUND}.engine.plan" in GRAPH["m2_batching.scheduler"]
    assert f"{GROUND}.engine.detokenizer" not in GRAPH[f"{GROUND}.engine.request"]
    assert f"{GROUND}.trace.console" in GRAPH[f"{GROUND}.trace.tracer"]  # inside a function
    assert "m3_paged.block_manager" in reachable("m5_kernels.engine")
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert {"m4_prefix_chunked.prefix_cache", "m2_batching.regions"} <= {
        module for module in FILES if PURE.fullmatch(module)
    }
