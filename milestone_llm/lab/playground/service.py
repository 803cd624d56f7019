"""The answers to the page's questions, as functions from JSON to text. The server only transports
them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from milestone_llm.core.errors import InputError
from milestone_llm.lab.explorer.live import PageLines
from milestone_llm.lab.explorer.page import PagePart, explorer_html

from .gpus import machine_named
from .machine import MACHINES
from .own import OwnFile
from .setting import ENGINES, RequestSpec, Setting, defaults_of, random_requests, told_in_a_line
from .simulate import FIGURES, Own, run_setting
from .sizing import answer

CHOICES = {  # fields of an `EngineConfig` with a choice of words
    "policy": ["fcfs", "priority"],
    "preemption": ["recompute", "swap"],
    "prefill_policy": ["mixed", "prefill_first"],
}
NO_POLICY: Mapping[str, str] = {}


class Playground:
    """Answers questions of the page: `answers` has a function for each path."""

    def __init__(self, file: OwnFile | None = None) -> None:
        self.file = file
        self.own: Callable[[], Own] = file.refresh if file else dict
        self.answers: dict[str, Callable[[Any], str]] = {
            "/run": self.run,
            "/random": self.random,
            "/trace": self.trace,
            "/sizing": lambda data: json.dumps(answer(data)),
            "/own": lambda data: str(file.version if file and self.own() else 0),
        }

    def run(self, data: Any) -> str:
        """Run a setting or a link. Returns a line with everything except records, then each side's
        records."""
        setting = Setting.of(data)
        outcomes = run_setting(setting, self.own())
        sides = [{**vars(each), "records": len(each.records)} for each in outcomes]
        head = {"setting": json.loads(setting.to_json()), "link": setting.to_link()}
        if any(outcome.records for outcome in outcomes):
            head["formula"] = machine_named(setting.machine).formula()
        lines = [json.dumps(head | {"sides": sides})]
        for outcome in outcomes:
            lines += map(PageLines().line, outcome.records)
        return "\n".join(lines)

    def trace(self, data: Any) -> str:
        """Return the trace of the first side as JSON lines."""
        outcome = run_setting(Setting.of(data), self.own())[0]
        if not outcome.records:
            raise InputError(outcome.problem)
        return "".join(json.dumps(record.to_dict()) + "\n" for record in outcome.records)

    def random(self, data: Any) -> str:
        """Return the requests of `random_requests` for its arguments."""
        with told_in_a_line():
            specs = random_requests(**(data if isinstance(data, dict) else {}))
        return json.dumps([vars(spec) for spec in specs])

    def html(self, ask: str = "", policy: Mapping[str, str] = NO_POLICY) -> str:
        """Return the page.

        Args:
            ask: a script that replaces page/ask.js and brings questions to `answers`.
            policy: what that script needs to be allowed, as in `PagePart`.
        """
        milestones = {name: (title, name) for name, title in ENGINES.items()}
        if self.file is not None:
            name = self.file.path.name
            milestones["own"] = (f"yours: {name}", self.file.milestone)
            milestones["own before"] = (f"before: {name}", self.file.milestone)
        data = {
            "presets": presets(),
            "engines": {
                engine: {"title": title, "defaults": defaults_of(milestone)}
                for engine, (title, milestone) in milestones.items()
            },
            "machines": {name: machine.title for name, machine in MACHINES.items()},
            "figures": FIGURES,
            "choices": CHOICES,
            "request": vars(RequestSpec()),
            "own": self.file and self.file.milestone,
            "own_setting": self.file and own_setting(self.file.milestone),
        }
        text = json.dumps(data).replace("<", "\\u003c")  # no element of the page ends inside it
        html = _asset("play.html").replace("{{data}}", text)
        script = (ask or _asset("ask.js")) + _asset("play.js")
        part = PagePart("Playground", html, script, _asset("play.css"), policy)
        return explorer_html(part=part)


def own_setting(milestone: str) -> dict[str, Any]:
    """Return a setting that shows what the order of a queue does: short and long requests come
    almost together, and there are two rows."""
    lengths = [(40, 60), (160, 20), (12, 12), (80, 40), (8, 8), (120, 16), (24, 30), (16, 10)]
    requests = [
        {"arrival": index / 10, "prompt": prompt, "output": output}
        for index, (prompt, output) in enumerate(lengths)
    ]
    fields = {"max_num_seqs": 2, "max_model_len": 256}
    return {"requests": requests, "sides": [{"engine": milestone, "fields": fields}]}


def presets() -> list[dict[str, Any]]:
    """Return the presets: settings that each ask a question."""
    found: list[dict[str, Any]] = json.loads(_asset("presets.json"))
    return found


def _asset(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")
