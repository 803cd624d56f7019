"""The rules of the house: who may import whom, what a folder shows, how much there is to read."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine_helpers import random_prompts, tiny_model
from m1_single import SamplingParams
from milestone_llm.core.engine_core import EngineCore

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
OTHER_PROGRAMS = {"m1_single.timeline"}  # the chapter's command, at the path where its file lies
FLOORS = [
    rf"{GROUND}\.__init__",
    *(rf"{GROUND}\.{room}\..*" for room in ("core", "models", "frontend", "trace", "command")),
    *(rf"{name}\.(?!({'|'.join(sorted(DOORS))}|timeline)$|tools\.).*" for name in MILESTONES[:-1]),
    # M5's lesson, what takes the place of its objects, and the engine, which chooses.
    rf"m5_kernels\.(?!({'|'.join(sorted(DOORS))}|engine|__init__)$|extras\.|tools\.).*",
    r"m5_kernels\.extras\..*",
    r"m5_kernels\.(engine|__init__)",
    rf"{GROUND}\.lab\..*",
    rf"{GROUND}\.serving\..*",
    *(rf"{name}\..*" for name in MILESTONES),
]
"""From the ground up; the last are the doors and tools of the milestones."""

KV_MANAGERS = (
    r"regions|block_pool|block_manager|completions|preemption|caching_pool|prefix_cache|ngram"
    r"|speculation"
)
SEAMS = re.compile(
    rf"{GROUND}\.core\.(engine_core|kv|outputs|plan|request|request_queue|scheduler)"
    rf"|{GROUND}\.frontend\.(engine_driver|step_log|output_queue|watching)"
    rf"|m\d_\w+\.(scheduler|{KV_MANAGERS})"
)
"""Modules where core, scheduler, runner and KV managers meet."""
PURE = re.compile(
    rf"{GROUND}\.core\.(errors|kv|outputs|plan|request|request_queue|sampling_params|scheduler)"
    rf"|{GROUND}\.frontend\.(config|engine_driver|step_log|output_queue|outputs|watching)"
    rf"|{GROUND}\.serving\.router|{GROUND}\.trace\.(records|tracer)"
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

MAX_LINES = {"door": 100, "instruments": 11_500}
MEASURING = {"bench", "bench_report", "bench_server", "open_loop", "overhead"}
"""The programs of serving that measure, by name."""


def num_lines(*paths: Path) -> int:
    """Lines of files, empty ones and comments included."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


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
    """Whether a module is a program at the top of a milestone's folder."""
    folder, _, name = module.rpartition(".")
    return folder in MILESTONES and (name in DOORS or module in OTHER_PROGRAMS)


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
    """Besides what measures: the server's page, which is the lab's, fed by a running engine."""
    programs = {f"{GROUND}.serving.{name}" for name in (*MEASURING, "live_page")}
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


def test_nobody_bends_where_python_looks_for_files():
    texts = {module: path.read_text(encoding="utf-8") for module, path in FILES.items()}
    assert [module for module, text in texts.items() if "__path__" in text] == []


# --- the lesson fits in one sitting --------------------------------------------------------------


def test_the_core_knows_no_text_threads_files_times_or_traces():
    for module in (module for module in FILES if module.startswith(f"{GROUND}.core.")):
        others = {name.split(".")[0] for name in imports_of(module) if name not in FILES}
        assert others <= LIBRARIES_OF_THE_CORE, f"{module}: {others - LIBRARIES_OF_THE_CORE}"


@pytest.mark.parametrize(
    ("milestone", "most_files"),
    [
        ("m1_single", 9),
        ("m2_batching", 13),
        ("m3_paged", 16),
        ("m4_prefix_chunked", 18),
        ("m5_kernels", 23),
    ],
)
def test_one_step_runs_through_few_files(milestone, most_files):
    """Files of ours in which a step calls something, kernels and extras aside."""
    files = files_of_a_step(importlib.import_module(milestone))
    found = f"{len(files)} files: {', '.join(sorted(path.stem for path in files))}"
    assert len(files) <= most_files, found


def files_of_a_step(package: Any) -> set[Path]:
    """What the bare core runs for a step of three prompts, one of them sampled."""
    engine = package.LLMEngine(tiny_model(), max_num_seqs=4, max_model_len=128)
    prompts = random_prompts([30, 12, 21])
    engine.generate(prompts[0], SamplingParams(max_tokens=2, temperature=0))  # what is done once
    for index, prompt in enumerate(prompts):
        temperature = 0.8 if index == 1 else 0
        engine.add_request(prompt, SamplingParams(temperature, max_tokens=8, seed=1))
    core = EngineCore(engine.scheduler, engine.runner)
    ours = {str(path): path for path in FILES.values()}
    files: set[Path] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = ours.get(frame.f_code.co_filename)
        is_aside = path is not None and {"kernels", "extras"} & set(path.parts)
        if event == "call" and path is not None and not is_aside:
            files.add(path)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        outputs = core.step()
    finally:
        sys.setprofile(before)
    assert [len(output.new_token_ids) for output in outputs] == [1, 1, 1]
    return files


# --- a milestone's folder shows what its step runs, and its doors --------------------------------


def top_level(milestone: str) -> set[str]:
    """Modules that one sees on opening the folder."""
    paths = (ROOT / milestone).glob("*.py")
    return {f"{milestone}.{path.stem}" for path in paths if path.stem != "__init__"}


@pytest.mark.parametrize("milestone", MILESTONES)
def test_a_folder_shows_the_engine_and_its_doors(milestone):
    engine = reachable(f"{milestone}.engine")
    doors = {module for module in top_level(milestone) if is_door(module)}
    assert {f"{milestone}.{name}" for name in DOORS} <= doors
    assert top_level(milestone) - doors <= engine, "no step runs these"


@pytest.mark.parametrize("milestone", MILESTONES)
def test_doors_are_short(milestone):
    lines = {name: num_lines(FILES[name]) for name in top_level(milestone) if is_door(name)}
    assert {name: n for name, n in lines.items() if n > MAX_LINES["door"]} == {}


@pytest.mark.parametrize("milestone", MILESTONES)
def test_folders_below_are_tools_and_rooms_of_m5(milestone):
    folders = {path.parent.name for path in (ROOT / milestone).glob("*/*.py")}
    rooms = {"decoder", "extras", "kernels"} if milestone == "m5_kernels" else set()
    assert folders - {"tools"} == rooms


def instruments() -> set[Path]:
    """The lab, doors, tools, guides, and the programs of serving that measure.

    Every file that a person has written counts, with its empty lines: Python, the page, texts.
    """
    patterns = {f"{GROUND}/lab": ["**/*.*"]}
    patterns[f"{GROUND}/serving"] = [f"{name}.py" for name in MEASURING]
    for milestone in MILESTONES:
        doors = [f"{door}.py" for door in (*DOORS, "timeline")]
        patterns[milestone] = [*doors, "tools/**/*.*", "guide.txt"]
    return {
        path
        for folder, own in patterns.items()
        for pattern in own
        for path in (ROOT / folder).glob(pattern)
        if path.suffix in {".py", ".js", ".css", ".html", ".svg", ".txt"}
    }


def test_instruments_weigh_less_than_they_did():
    """Without the playground, which shows no run but is one."""
    playground = ROOT / GROUND / "lab" / "playground"
    paths = {path for path in instruments() if not path.is_relative_to(playground)}
    assert num_lines(*paths) <= MAX_LINES["instruments"]


def test_instruments_weigh_less_than_engines_and_kernels_together():
    rooms = (f"{GROUND}.core.", f"{GROUND}.frontend.", f"{GROUND}.models.", *MILESTONES)
    engines = {path for module, path in FILES.items() if module.startswith(rooms)} - instruments()
    assert num_lines(*instruments()) < num_lines(*engines)


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
    floors += [floor_of(f"{GROUND}.lab.doctor"), floor_of(f"{GROUND}.serving.app")]
    floors += [floor_of("m1_single.demo"), floor_of("m4_prefix_chunked.tools.stress")]
    assert floors == sorted(set(floors))
    assert all((ROOT / GROUND / "serving" / f"{name}.py").exists() for name in MEASURING)
