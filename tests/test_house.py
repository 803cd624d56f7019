"""The rules of the house: who may import whom, what the lesson names, what one walks through."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from house_figures import files_to_the_kernel, frames_to_schedule

ROOT = Path(__file__).parents[1]
GROUND = "milestone_llm"
MILESTONES = ["m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels"]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in (GROUND, *MILESTONES)
    for path in (ROOT / package).rglob("*.py")
}
"""Path of each module by its dotted name; a package's root ends in `.__init__`."""

DOORS = {"demo", "walkthrough", "bench", "serve"}
OTHER_PROGRAMS = {"m1_single.timeline", f"{GROUND}.serving.bench"}
"""Commands of chapters, at the paths where they are called."""
FLOORS = [
    rf"{GROUND}\.__init__",
    *(rf"{GROUND}\.{room}\..*" for room in ("core", "models", "frontend", "trace", "command")),
    *(rf"{name}\.(?!({'|'.join(sorted(DOORS))}|timeline)$|tools\.).*" for name in MILESTONES[:-1]),
    # M5's lesson, what takes the place of its objects, and the engine, which chooses.
    rf"m5_kernels\.(?!({'|'.join(sorted(DOORS))}|engine|__init__)$|extras\.|tools\.).*",
    r"m5_kernels\.extras\..*",
    r"m5_kernels\.(engine|__init__)",
    rf"{GROUND}\.lab\.(?!load\.).*",
    *(rf"{GROUND}\.serving\.{room}\..*" for room in ("engine", "api", "connections|replicas")),
    rf"{GROUND}\.serving\.(?!bench$).*",
    rf"{GROUND}\.lab\.load\..*",
    rf"{GROUND}\.serving\.bench",
    *(rf"{name}\..*" for name in MILESTONES),
]
"""From the ground up; the last are the doors and tools of the milestones."""

KV_MANAGERS = (
    r"regions|block_pool|block_manager|completions|preemption|caching_pool|prefix_cache|ngram"
    r"|speculation"
)
SEAMS = re.compile(
    rf"{GROUND}\.core\.(engine_core|kv|outputs|plan(_rules)?|request(_queue)?|scheduler)"
    rf"|{GROUND}\.frontend\.(engine_driver|step_log|output_queue|watching)"
    rf"|m\d_\w+\.(scheduler|{KV_MANAGERS})"
)
"""Modules where core, scheduler, runner and KV managers meet."""
PURE = re.compile(
    rf"{GROUND}\.core\.(errors|kv|outputs|plan(_rules)?|request(_queue)?|sampling_params|scheduler)"
    rf"|{GROUND}\.frontend\.(config|engine_driver|step_log|output_queue|outputs|watching)"
    rf"|{GROUND}\.serving\.replicas\.router|{GROUND}\.trace\.(records|tracer)"
    rf"|m\d_\w+\.(scheduler|config|kv_usage|{KV_MANAGERS})"
)
"""Modules that decide and keep books: they know requests, tokens and blocks, and no tensors."""
TENSOR_LIBRARIES = {"torch", "transformers", "triton", "numpy"}
LIBRARIES_OF_THE_CORE = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "math",
}
LIBRARIES_OF_THE_CORE |= {"operator", "torch", "typing"}


def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere: inside functions, and for types alone."""
    for node in ast.walk(tree_of(module)):
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


@functools.cache
def graph() -> dict[str, set[str]]:
    """For each module of ours, those that it imports."""
    return {module: {name for name in imports_of(module) if name in FILES} for module in FILES}


def reachable(start: str) -> set[str]:
    """What a module imports, directly or through others, itself included."""
    seen, pending = {start}, [start]
    while pending:
        new = graph()[pending.pop()] - seen
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


def floor_of(module: str) -> int:
    """The lowest floor whose pattern fits."""
    return next(number for number, floor in enumerate(FLOORS) if re.fullmatch(floor, module))


def is_door(module: str) -> bool:
    """Whether a module is a program at the top of a folder."""
    folder, _, name = module.rpartition(".")
    return module in OTHER_PROGRAMS or (folder in MILESTONES and name in DOORS)


def room_of(module: str) -> str:
    """The folder that a module lies in: `milestone_llm.core`, `m5_kernels.kernels`.

    The doors of a milestone, which lead to its engine and to its tools, count as one of their own,
    and so does M5's engine, which lies above its extras as well as above the lesson.
    """
    folder = module.rpartition(".")[0]
    if module in ("m5_kernels.engine", "m5_kernels.__init__"):
        return "m5_kernels.engine"
    return f"{folder}.doors" if is_door(module) else folder


# --- arrows point down ---------------------------------------------------------------------------


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_from_itself_and_from_lower_ones_only(floor):
    number = FLOORS.index(floor)
    wrong = [
        f"{module} imports {imported}"
        for module in FILES
        if floor_of(module) == number
        for imported in graph()[module]
        if floor_of(imported) > number
    ]
    assert wrong == []


def test_lab_and_serving_know_milestones_by_their_roots_alone():
    """What they watch and serve is any engine: no part of one milestone."""
    roots = {f"{name}.__init__" for name in MILESTONES}
    for module in FILES:
        if module.startswith((f"{GROUND}.lab.", f"{GROUND}.serving.")):
            own = {name for name in graph()[module] if name.startswith(tuple(MILESTONES))}
            assert own <= roots, f"{module} imports {own - roots}"


def test_programs_alone_import_the_lab():
    """And the server's page, which is the lab's, fed by a running engine."""
    programs = {f"{GROUND}.serving.api.live_page"}
    programs |= {module for module in FILES if is_door(module) or ".tools." in module}
    importing = {
        module
        for module, imported in graph().items()
        if not module.startswith(f"{GROUND}.lab.")
        and any(name.startswith(f"{GROUND}.lab.") for name in imported)
    }
    assert importing - programs == set()


def test_there_is_no_circle_among_files():
    assert circle_in(graph()) == []


def test_there_is_no_circle_among_folders():
    rooms: dict[str, set[str]] = {}
    for module, imported in graph().items():
        targets = {room_of(name) for name in imported if not name.endswith(".__init__")}
        rooms.setdefault(room_of(module), set()).update(targets - {room_of(module)})
    assert circle_in(rooms) == []


def test_schedulers_and_managers_import_no_tensors_not_even_through_others():
    for module in (module for module in FILES if PURE.fullmatch(module)):
        for inner in reachable(module):
            libraries = {name.split(".")[0] for name in imports_of(inner)}
            assert not libraries & TENSOR_LIBRARIES, f"{module} loads tensors through {inner}"


def test_kernels_import_no_engine():
    for module in (module for module in FILES if ".kernels." in module):
        for imported in graph()[module]:
            assert not imported.endswith((".engine", ".scheduler", ".runner")), module


# --- the lesson names no extra -------------------------------------------------------------------


def test_the_core_knows_no_text_threads_files_times_or_traces():
    for module in (module for module in FILES if module.startswith(f"{GROUND}.core.")):
        others = {name.split(".")[0] for name in imports_of(module) if name not in FILES}
        assert others <= LIBRARIES_OF_THE_CORE, f"{module}: {others - LIBRARIES_OF_THE_CORE}"


LESSON = re.compile(
    r"m5_kernels\.(?!extras\.|tools\.|(engine|config|\w*bench|demo|walkthrough|serve)$).*"
)
EXTRAS = re.compile(r"\b(int8|hopper|tensor_parallel|guess(es)?|draft_token_ids|proposer)\b")
"""Names of extras. What an H200 is called may be said in words: that is no name in code."""


def names_in_code(module: str) -> str:
    """All that a module's code names: no comments, no docstrings."""
    tree = tree_of(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(value="")
    return ast.unparse(tree)


def test_the_lesson_names_no_extra():
    """Of M5's lesson the engine alone, which chooses them, and the fields that ask for them."""
    for module in (module for module in FILES if LESSON.fullmatch(module)):
        assert not [name for name in graph()[module] if ".extras." in name], module
        assert not EXTRAS.search(names_in_code(module)), module


def test_the_core_names_nothing_that_m1_has_not():
    for module in (module for module in FILES if module.startswith(f"{GROUND}.core.")):
        assert not re.search(r"guess|draft|speculat|\bforks?\b|\branks\b", names_in_code(module)), (
            module
        )


@pytest.mark.parametrize("milestone", MILESTONES)
def test_four_frames_lie_between_a_step_and_its_schedule(milestone):
    """`LLMEngine.step`, the driver's, the core's, `schedule`: what a debugger steps through."""
    assert frames_to_schedule(milestone) == 4


def test_one_walks_from_the_engine_to_the_card_s_kernel_without_a_detour():
    names = [path.stem for path in files_to_the_kernel()]
    assert names == ["engine", "runner", "device_step", "decoder", "attention", "flash_decode"]


# --- whole schedulers, engines assembled in the open ---------------------------------------------


@pytest.mark.parametrize("milestone", MILESTONES[:4])
def test_a_scheduler_is_one_file_to_be_read_alone(milestone):
    module = f"{milestone}.scheduler"
    assert [n for n in graph()[module] if n.endswith(".scheduler")] == [f"{GROUND}.core.scheduler"]
    (base,) = importlib.import_module(module).Scheduler.__bases__
    assert base.__module__ == f"{GROUND}.core.scheduler"


@pytest.mark.parametrize("milestone", MILESTONES)
def test_engine_scheduler_and_runner_have_one_base_at_most(milestone):
    for module in reachable(f"{milestone}.engine"):
        for _, found in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            ours = [b for b in found.__mro__ if b.__module__.split(".")[0] in (GROUND, *MILESTONES)]
            if found.__name__.endswith(("Engine", "EngineConfig", "Scheduler", "Runner")):
                assert len(ours) <= 2, f"{found.__qualname__}: {ours}"
            assert len(found.__bases__) == 1 or len(ours) <= 1, f"{found.__qualname__}: {ours}"


@pytest.mark.parametrize("milestone", MILESTONES)
def test_an_engine_is_assembled_in_its_constructor(milestone):
    engine = importlib.import_module(f"{milestone}.engine").LLMEngine
    hooks = {"load", "check_model", "open_trace", "build_scheduler", "build_runner", "_run_once"}
    loop = {"step", "generate", "stream", "abort", "_run", "add_request"}
    assert not (hooks | loop) & set(vars(engine))
    (base,) = engine.__bases__
    assert base.__module__ == f"{GROUND}.frontend.engine"
    assert not hooks & set(vars(base))


def test_no_property_changes_anything():
    rooms = (f"{GROUND}.core.", f"{GROUND}.frontend.", *(f"{name}.engine" for name in MILESTONES))
    for module in (module for module in FILES if module.startswith(rooms)):
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                assert not [mark for mark in marks if mark.endswith(".setter")], module


def names_in(annotations: Iterable[ast.expr | None]) -> set[str]:
    """All names that occur in some annotations."""
    return {
        node.id
        for annotation in annotations
        if annotation is not None
        for node in ast.walk(annotation)
        if isinstance(node, ast.Name)
    }


def test_there_is_no_any_where_the_parts_meet():
    for module in (module for module in FILES if SEAMS.fullmatch(module)):
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
    assert importlib.import_module(f"{milestone}.engine").EngineConfig is root.EngineConfig


def test_parts_shared_by_all_are_one_class():
    roots = [importlib.import_module(milestone) for milestone in MILESTONES]
    assert len({root.SamplingParams for root in roots}) == 1
    assert len({root.RequestOutput for root in roots}) == 1


def test_a_field_of_a_config_is_the_same_in_all_later_milestones():
    configs = [importlib.import_module(milestone).EngineConfig for milestone in MILESTONES]
    for lower, higher in pairwise(configs):
        kept = {field.name: (field.type, field.default) for field in fields(higher)}
        own = {field.name: (field.type, field.default) for field in fields(lower)}
        assert own.items() <= kept.items()
        assert list(kept)[: len(own)] == list(own), "in the order in which they came"


def test_the_rules_see_what_they_are_to_forbid():
    """A rule that sees no imports, circles or classes would hold nothing."""
    assert "torch" in set(imports_of("m1_single.runner"))
    assert f"{GROUND}.core.plan" in graph()["m2_batching.scheduler"]
    assert "m2_batching.engine" in graph()["m2_batching.__init__"]  # for types alone
    assert f"{GROUND}.trace.tracer" in {n for names in graph().values() for n in names}
    assert "m3_paged.block_manager" in reachable("m5_kernels.engine")
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert {"m4_prefix_chunked.prefix_cache", "m2_batching.regions"} <= {
        module for module in FILES if PURE.fullmatch(module)
    }
    floors = [floor_of(name) for name in ("m1_single.engine", "m5_kernels.kernels.tiles")]
    floors += [floor_of(f"{GROUND}.lab.doctor"), floor_of(f"{GROUND}.serving.api.app")]
    floors += [floor_of("m1_single.demo"), floor_of("m4_prefix_chunked.tools.stress")]
    assert floors == sorted(set(floors))
