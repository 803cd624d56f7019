"""Figures of the house, to compare before and after a change of structure: `make figures`

    frames      on the stack from an engine's `step()` to its scheduler's `schedule()`
    files       on the stack from M5's `step()`, and from its decoder, to `flash_decode`
    extras      that building M5's engine loads, and who names an extra without being part of it
    lines       of each room, and the longest function of M5

They say what a reader walks through. Folders are listed and stacks are looked at, so that files may
get other names. What depends on what a process has loaded is asked in a fresh one (`PROBES`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
MILESTONES = ["m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels"]
PACKAGES = [*MILESTONES, "milestone_llm"]
M5, EXTRAS = ROOT / "m5_kernels", ROOT / "m5_kernels" / "extras"
PREFIX = "m5_kernels.extras."
CPU, CPU_INT8 = "on a CPU", "on a CPU, int8"
HOPPER = "as on an H200 (cuda_on_cpu's device, said to have compute capability 9.0)"
Frame = tuple[str, str]
"""File, from the root on where it is the project's, and function."""

GUESSES = r"guess|draft|specul|propos|ngram"
WORDS = {
    "cpu": r"CPU[A-Z]|[a-z]CPU|\bcpu_(?:attention|int8|linear|ops)",  # "cpu" alone is a device
    "hopper": "(?i:hopper)",
    "int8": r"^(?!\.u?int8$).*(?i:int8)",  # so is torch.int8 a dtype
    "gguf": "(?i:gguf)",
    "spec_decode": f"(?i:{GUESSES})",
    "tensor_parallel": r"(?i:tensor_parallel)|\bRanks?\b|RankPeers|\bShard\b",
    "completions": r"(?i:completion)|\bforks?\b",
}
"""By feature, what names it in code."""


# --- in a process of their own --------------------------------------------------------------------


def make_engine(milestone: str, model: Any = None, **fields: Any) -> Any:
    """A small engine with one request; a layer of Qwen3 unless a model is named."""
    from milestone_llm.models.tiny_models import build_tiny_model

    package = importlib.import_module(milestone)
    model = model or build_tiny_model("qwen3", num_hidden_layers=1)
    engine = package.LLMEngine(model, max_num_seqs=2, max_model_len=32, **fields)
    engine.add_request([1, 2, 3], package.SamplingParams(temperature=0, max_tokens=4))
    return engine


def watch(work: Callable[[], object], name: str) -> tuple[list[Frame], list[str]]:
    """Frames from `step` to the first call of `name`, none if it is not called; all files whose
    code runs."""
    stack: list[Frame] = []
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        files[frame.f_code.co_filename] = None
        if event != "call" or frame.f_code.co_name != name or stack:
            return
        walk: FrameType | None = frame
        while walk is not None:
            stack.insert(0, (from_root(walk.f_code.co_filename), walk.f_code.co_name))
            walk = walk.f_back

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    first = next((i for i, (_, function) in enumerate(stack) if function == "step"), 0)
    return stack[first:], [*map(from_root, files)]


def from_root(path: str) -> str:
    """The path of a file of the project from the root on; another one as it is."""
    name = path.removeprefix(f"{ROOT}/")
    return name if name.partition("/")[0] in PACKAGES else path


def loaded_extras() -> list[str]:
    """Modules of extras in this process."""
    return sorted(name for name in sys.modules if name.startswith(PREFIX))


def frames_to_schedule() -> dict[str, list[Frame]]:
    """By milestone, the stack at `schedule`."""
    return {name: watch(make_engine(name).step, "schedule")[0] for name in MILESTONES}


def decode_step(**fields: Any) -> tuple[list[str], list[Frame], list[str]]:
    """What building M5's engine loads, the stack at `flash_decode`, extras' files that run."""
    engine = make_engine("m5_kernels", **fields)
    loaded = loaded_extras()
    engine.step()  # the prompt
    stack, files = watch(engine.step, "flash_decode")
    return loaded, stack, [name for name in files if name.startswith("m5_kernels/extras/")]


def built_on_hopper() -> tuple[list[str]]:
    """What building M5's engine loads on `cuda_on_cpu`'s device that says it is a Hopper."""
    import torch
    from triton import JITFunction

    from m5.cuda_on_cpu import cuda_on_cpu
    from milestone_llm.models.tiny_models import TINY_FAMILIES

    with (
        cuda_on_cpu(),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(JITFunction, "run"),  # kernels in Gluon, which has no interpreter
        mock.patch.dict(TINY_FAMILIES["qwen3"], head_dim=64),  # which Hopper's kernels know
    ):
        fields = {"device": "cuda:0", "dtype": "bfloat16", "kv_cache_tokens": 64}
        make_engine("m5_kernels", "tiny-qwen3", **fields)
        return (loaded_extras(),)


PROBES: dict[str, tuple[Callable[[], Any], str]] = {
    "frames": (frames_to_schedule, "0"),
    "kernels": (decode_step, "1"),
    CPU: (decode_step, "0"),
    CPU_INT8: (lambda: decode_step(quantization="int8"), "0"),
    HOPPER: (built_on_hopper, "1"),
}
"""What is asked, and `TRITON_INTERPRET` for it. With "1" kernels run, and a CPU gets the objects of
a GPU (that is no Hopper)."""


def ask(probe: str) -> Any:
    """The answer of a fresh process, which has no GPU."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": PROBES[probe][1],
    }
    command = [sys.executable, __file__, probe]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# --- read in the source ---------------------------------------------------------------------------


def python_files(folder: Path, pattern: str = "**/*.py") -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if "__pycache__" not in path.parts)


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def names_in_code(path: Path) -> set[str]:
    """Identifiers (`.name` of an attribute), modules with what is imported from them, and strings
    that are one word: a comment, a docstring or a message to the user is none."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module or ''}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value} if len(node.value.split()) == 1 else set()
        else:
            fields = (getattr(node, field, None) for field in ("name", "id", "arg"))
            names |= {name for name in fields if isinstance(name, str)}
    return names


def files_that_name(extra: str) -> list[str]:
    """Files of packages that name a feature in code and whose path does not."""
    words = re.compile(WORDS[extra])
    found = []
    for path in (path for package in PACKAGES for path in python_files(ROOT / package)):
        name = path.relative_to(ROOT).as_posix()
        is_own = extra in name or words.search(name)
        if not is_own and any(map(words.search, names_in_code(path))):
            found.append(name.removeprefix("m5_kernels/"))
    return found


def function_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and name of each function or method that is no kernel."""
    for parent in nodes_of(path):
        if isinstance(parent, (ast.ClassDef, ast.Module)):
            owner = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
            for each in (child for child in parent.body if isinstance(child, ast.FunctionDef)):
                if not any("jit" in ast.unparse(mark) for mark in each.decorator_list):
                    yield (each.end_lineno or 0) - each.lineno + 1, owner + each.name


def num_imports_of_extras(path: Path) -> int:
    imports = (node for node in nodes_of(path) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return sum(bool(re.search(r"\bextras\b", ast.unparse(each))) for each in imports)


def rooms() -> Iterator[tuple[str, list[Path]]]:
    """Each folder of a package, and the package's own files; the rest as a whole."""
    for package in PACKAGES:
        yield package, python_files(ROOT / package, "*.py")
        for folder in sorted({path.parent for path in python_files(ROOT / package, "*/*.py")}):
            if folder != EXTRAS:
                yield f"  {folder.name}", python_files(folder)
        if package == M5.name:
            yield "  extras", python_files(EXTRAS, "*.py")
            yield from ((f"  extras/{name}", python_files(EXTRAS / name)) for name in extras())
    for name in ("tests", "exercises", "docs"):
        yield name, python_files(ROOT / name)


def extras() -> list[str]:
    return sorted(path.parent.name for path in EXTRAS.glob("*/__init__.py"))


# --- what is printed ------------------------------------------------------------------------------


def show(title: str, names: list[str]) -> None:
    print(f"  {title}")
    if names:
        print(textwrap.fill(", ".join(names), 96, initial_indent="    ", subsequent_indent="    "))


def show_way(start: str, stack: list[Frame]) -> None:
    names = dict.fromkeys(path for path, _ in stack)
    files = [name for name in names if name.partition("/")[0] in PACKAGES]
    of_m5 = [path for path in files if path.startswith("m5_kernels/")]
    counts = [
        f"{len(each)} files, {num_lines([ROOT / path for path in each])} lines"
        for each in (files, of_m5)
    ]
    show(
        f"from {start}: {counts[0]}; of M5 {counts[1]}",
        [path.removeprefix("m5_kernels/") for path in files],
    )


def show_stacks(found: dict[str, Any]) -> None:
    print("Frames from step() to schedule()")
    for milestone, stack in found["frames"].items():
        way = " > ".join(f"{Path(path).stem}.{function}" for path, function in stack)
        print(f"  {milestone:18} {len(stack)}  {way}")

    print("\nFiles on the stack at flash_decode; Triton's interpreter, objects of a GPU")
    stack = found["kernels"][1]
    first = next(i for i, (path, _) in enumerate(stack) if path.startswith("m5_kernels/decoder/"))
    show_way("LLMEngine.step()", stack)
    show_way(f"the decoder's {stack[first][1]}()", stack[first:])
    _, stack, files = found[CPU]
    print(f"  reached on a plain CPU: {'yes' if stack else 'no'}")
    names = [name.removeprefix("m5_kernels/extras/") for name in files]
    show(f"files of extras that a decode step runs on a plain CPU: {len(names)}", names)

    print("\nModules of m5_kernels.extras in a fresh process that has built an engine")
    for place in (CPU, CPU_INT8, HOPPER):
        names = [name.removeprefix(PREFIX) for name in found[place][0]]
        show(f"{place}: {len(names)}", names)


def show_source() -> None:
    print("\nFiles of packages that name a feature in code, and are no part of it")
    for extra in WORDS:
        names = files_that_name(extra)
        show(f"{extra}: {len(names)}", names)

    print(f"\n{'Lines by room':24} files   lines")
    for room, files in rooms():
        print(f"{room:24} {len(files):5} {num_lines(files):7,}")

    lines = [(*each, path.name) for path in python_files(M5) for each in function_lines(path)]
    print("\nLongest function of M5 that is no kernel: {1}, {0} lines, {2}".format(*max(lines)))
    engine = {name: length for length, name in function_lines(M5 / "engine.py")}
    print(f"Constructor of M5's engine: {engine.get('LLMEngine.__init__', 0)} lines")
    choosers = {path.name: num_imports_of_extras(path) for path in python_files(M5, "*.py")}
    print(f"Imports of extras in m5_kernels/engine.py: {choosers.pop('engine.py')}")
    others = [f"{name} {number}" for name, number in choosers.items() if number]
    print(f"Imports of extras in files beside it: {', '.join(others) or 'none'}")


def main() -> None:
    """Ask the probes, two at a time, and print everything."""
    with ThreadPoolExecutor(2) as pool:
        show_stacks(dict(zip(PROBES, pool.map(ask, PROBES), strict=True)))
    show_source()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with contextlib.redirect_stdout(sys.stderr):
            answer = PROBES[sys.argv[1]][0]()
        print(json.dumps(answer))
    else:
        main()
