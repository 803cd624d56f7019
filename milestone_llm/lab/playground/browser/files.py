"""The playground's answers in a browser, and the files that a reader edits on its page: a scheduler
of their own, and the parts of a course.
"""

from __future__ import annotations

import importlib
import json
import linecache
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exercises.build.check import Course, problem
from milestone_llm import MILESTONES
from milestone_llm.lab.playground.own import Here, OwnFile
from milestone_llm.lab.playground.service import Playground

COURSES = ("m2", "m3", "m4", "replicas")
SCHEDULERS = [f"{milestone}/scheduler.py" for milestone in MILESTONES[:4]]


class Files:
    """Answers the page, as `server.py` does without a browser, and saves and checks a reader's
    files.

    Args:
        root: folder of the engine's sources; files of a course are written there.
        folder: folder for the reader's scheduler.
    """

    def __init__(self, root: str = "/engine", folder: str = "/own") -> None:
        self.root, self.folder = Path(root), Path(folder)
        self.playground = Playground()
        self.answers: dict[str, Callable[[Any], str]] = {
            "/files": lambda data: json.dumps(self.texts()),
            "/write": self.write,
            "/check": self.check,
        }

    def answer(self, path: str, body: str) -> tuple[bool, str]:
        """Return (True, the answer) or (False, the error) for a question with this JSON."""
        try:
            return True, {**self.playground.answers, **self.answers}[path](json.loads(body))
        except (ValueError, RecursionError) as error:  # bad input, no JSON, too long a number
            return False, str(error)

    def texts(self) -> dict[str, str]:
        """Return the files that can be opened, in their original form."""
        texts = {name: (self.root / name).read_text(encoding="utf-8") for name in SCHEDULERS}
        for course in map(Course.named, COURSES):
            own = course.texts()
            first = [path for path in map(course.path, course.steps) if path in own]
            texts |= {path: own[path] for path in [*first, *own]}  # in the order of the steps
        return texts

    def write(self, data: Mapping[str, str]) -> str:
        """Save the reader's copy of a milestone's scheduler. From now on the playground runs it."""
        path = self.folder / Path(data["name"]).parent / "scheduler.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data["text"], encoding="utf-8")
        if self.playground.file is None or self.playground.file.path != path:
            self.playground = Playground(OwnFile(path, Here))
        return self.playground.file.milestone if self.playground.file else ""

    def check(self, data: Mapping[str, Any]) -> str:
        """Save files by name, and check a course's steps up to the first that fails."""
        course = Course.named(data["course"])
        for name, text in data["files"].items():
            (self.root / name).write_text(text, encoding="utf-8")
            shutil.rmtree((self.root / name).parent / "__pycache__", ignore_errors=True)
        package = course.parts.package
        for name in [each for each in sys.modules if each.startswith(f"{package}.")]:
            if not name.endswith(".steps"):
                del sys.modules[name]
        importlib.invalidate_caches()
        linecache.checkcache()
        told = []
        for number, step in enumerate(course.steps, 1):
            title = f"{number}  {step.title}"
            if step.needs_model:
                told.append(f"{title}: on your machine, python -m exercises.build {course.name}")
            elif found := problem(step, course.parts):
                told += [title, "", step.task, f"You write it above, in {step.file}.", "", found]
                break
            else:
                told.append(f"{title}  passes")
        return "\n".join(told)
