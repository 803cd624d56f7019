"""The playground without a server: Python in WebAssembly, under Node and in Chromium."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from milestone_llm.core.errors import InputError
from milestone_llm.lab.playground.browser.pack import fetched_runtime
from milestone_llm.lab.playground.service import Playground, presets
from milestone_llm.lab.playground.setting import Setting
from milestone_llm.lab.playground.simulate import run_setting
from page_helpers import Opened


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


def test_presets_give_the_same_bytes_in_webassembly(packed):
    broken = {"requests": [], "sides": []}
    settings = json.dumps([*presets(), broken])
    command = ["node", str(Path(__file__).with_name("answers.mjs")), str(packed)]
    ended = subprocess.run(command, input=settings, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *answers, told = json.loads(ended.stdout)
    assert answers == list(map(Playground().run, presets()))
    assert answers == json.loads((packed / "answers.json").read_text("utf-8"))
    assert told.startswith("requests: ")


def test_a_preset_is_drawn_before_python_is_there_and_changes_afterwards(browser, url):
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
    assert {each[: len(url)] for each in opened.requests} == {url}
    assert opened.errors == []
