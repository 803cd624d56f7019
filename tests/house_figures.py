"""Three figures of the house: `python tests/house_figures.py`

    frames      from an engine's `step()` to its scheduler's `schedule()`, as they lie on the stack
    features    files of engines that name a feature and are not its room
    kernel      files, and their lines, from M5's engine to the kernel that the milestone is named
                after, as they lie on the stack of a step

They say what a reader walks through, and cannot be met by moving lines about.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
MILESTONES = ["m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels"]
NO_ENGINE = re.compile(
    r"/tools/|/(demo|walkthrough|bench|serve|timeline|__init__)\.py$|milestone_llm/(lab|serving)/"
)
FEATURES = {
    "guesses": (
        r"guess|draft|speculat|spec_decode",
        r"speculation|verification|ngram|/guesses|propos",
    ),
    "int8": (r"int8|eight bits|quantiz", r"int8"),
    "ranks": (
        r"\branks?\b|tensor_parallel|\bshard",
        r"tensor_parallel|decoder/parallel|all_reduce",
    ),
    "early starts": (
        r"\bpdl\b|early_start|next_starts|launch_options|wait_for_previous",
        r"early_st",
    ),
    "hopper": (r"hopper", r"hopper"),
    "completions": (r"completion|\bforks?\b", r"completions\.py"),
}
"""Of each, what names it, and its rooms: in a path."""


def stack_at(name: str, work: Callable[[], object]) -> list[tuple[str, str]]:
    """File and function of each frame from this project's `step` to the first call of `name`."""
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
    first = next(i for i, (path, function) in enumerate(found) if function == "step")
    return found[first:]


def engine_of(milestone: str) -> Any:
    """A tiny engine with one request."""
    from engine_helpers import tiny_model

    package = importlib.import_module(milestone)
    engine = package.LLMEngine(tiny_model(), max_num_seqs=2, max_model_len=32)
    engine.add_request([1, 2, 3], package.SamplingParams(temperature=0, max_tokens=4))
    return engine


def frames_to_schedule(milestone: str) -> int:
    """Frames from `step()` to `schedule()`, both counted."""
    return len(stack_at("schedule", engine_of(milestone).step))


def files_that_name(feature: str) -> list[str]:
    """Files of engines that name a feature, outside its rooms."""
    word, room = (re.compile(pattern, re.IGNORECASE) for pattern in FEATURES[feature])
    paths = [
        path for folder in ("milestone_llm", *MILESTONES) for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    engines = [name for name in names if not NO_ENGINE.search(name) and not room.search(name)]
    return [name for name in engines if word.search((ROOT / name).read_text(encoding="utf-8"))]


def files_to_the_kernel() -> list[Path]:
    """Files on the stack of a step, from M5's runner to `flash_decode`; the engine comes first."""
    with mock.patch("m5_kernels.engine.runs_no_kernels", return_value=False):
        engine = engine_of("m5_kernels")
    engine.step()  # the prompt
    stack = stack_at("flash_decode", engine.step)
    files = dict.fromkeys(Path(path) for path, _ in stack if path.startswith(str(ROOT)))
    of_m5 = [path for path in files if "m5_kernels" in path.parts]
    return [ROOT / "m5_kernels" / "engine.py", *of_m5]


def main() -> None:
    """Print them."""
    print("frames from step() to schedule()")
    for milestone in MILESTONES:
        print(f"  {milestone:18} {frames_to_schedule(milestone)}")
    print("files of engines that name a feature outside its room")
    for feature in FEATURES:
        names = files_that_name(feature)
        print(f"  {feature:13} {len(names):3}  {', '.join(names)}")
    files = files_to_the_kernel()
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    print(f"from M5's engine to flash_decode: {len(files)} files, {lines} lines")
    print("  " + " > ".join(path.relative_to(ROOT / "m5_kernels").as_posix() for path in files))


if __name__ == "__main__":
    main()
