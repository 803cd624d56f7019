"""The playground without a server: Python in WebAssembly, under Node and in Chromium."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from exercises.build.check import Course
from helpers.pages import Opened
from milestone_llm.core.errors import InputError
from milestone_llm.lab.playground.browser.pack import fetched_runtime
from milestone_llm.lab.playground.service import Playground, presets
from milestone_llm.lab.playground.setting import Setting
from milestone_llm.lab.playground.simulate import run_setting

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """The folder, packed where no test has imported more than is needed."""
    try:
        fetched_runtime()
    except InputError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("packed") / "play"
    command = [sys.executable, "-m", "milestone_llm.lab.playground.browser.pack", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return folder


class Handler(SimpleHTTPRequestHandler):
    """Keeps Python back until `engine_may_go`."""

    engine_may_go: threading.Event

    def do_GET(self) -> None:
        if self.path == "/engine.zip":
            self.engine_may_go.wait()
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(packed) -> Iterator[str]:
    Handler.engine_may_go = threading.Event()
    handler = functools.partial(Handler, directory=packed)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def of_milestone(name: str) -> dict[str, str]:
    """The reader's files of a course, as the milestone has them."""
    course = Course.named(name)
    whole = [replace(each, todo={}, without=()) for each in course.files]
    return replace(course, files=whole).texts()


def test_webassembly_gives_presets_the_same_bytes_and_checks_the_courses(packed):
    courses = ("m2", "m3", "m4", "replicas")
    asked: list[tuple[str, object]] = [("/run", preset) for preset in presets()]
    asked += [("/check", {"course": course, "files": of_milestone(course)}) for course in courses]
    asked += [("/check", {"course": "m3", "files": {}}), ("/run", {"requests": [], "sides": []})]
    command = ["node", str(Path(__file__).with_name("answers.mjs")), str(packed)]
    ended = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *answers, m2, m3, m4, replicas, m3_again, broken = json.loads(ended.stdout)
    assert answers == list(map(Playground().run, presets()))
    assert answers == json.loads((packed / "answers.json").read_text("utf-8"))
    assert replicas.count("passes") == len(Course.named("replicas").steps)
    for told, course in zip((m2, m3, m4), courses[:3], strict=True):
        *passed, last = told.splitlines()
        assert len(passed) == len(Course.named(course).steps) - 1
        assert all(line.endswith("passes") for line in passed), told
        assert f"python -m exercises.build {course}" in last
    assert m3_again == m3
    assert broken.startswith("requests: ")


def test_a_preset_is_drawn_before_python_is_there_then_changed_then_ones_own_code_runs(
    browser, url
):
    opened = Opened(browser, url)
    opened.page.wait_for_function("() => views.length === 2")
    opened.page.select_option("#play-machine", "h200")
    assert opened.page.input_value("#play-preset") == "", "it is no preset any more"
    opened.page.wait_for_function("() => document.body.classList.contains('stale')")
    Handler.engine_may_go.set()
    opened.page.wait_for_selector("body[data-python]:not(.stale)")
    changed = Setting.of({**presets()[0], "machine": "h200"})
    figures = "() => lab.head.sides.map((side) => side.figures)"
    assert opened(figures) == [each.figures for each in run_setting(changed)]
    opened.page.click("#code-open")
    opened.page.click("#code .cm-content")
    opened.page.keyboard.press("Control+End")
    opened.page.keyboard.insert_text("1 / 0\n")
    opened.page.wait_for_selector("#play-problem:not([hidden])")
    assert "ZeroDivisionError" in opened.page.inner_text("#play-problem")
    opened.page.click("#code-again")
    opened.page.wait_for_selector("#play-problem", state="hidden")
    milestones, yours = opened(figures)
    assert milestones == yours
    assert {each[: len(url)] for each in opened.requests} == {url}
    assert opened.errors == []
