"""The playground in Chromium: what is changed there is run by the engines' schedulers, at once."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.pages import Opened, assert_whole_and_accessible
from milestone_llm.lab.playground.own import OwnFile
from milestone_llm.lab.playground.own_process import InAProcess
from milestone_llm.lab.playground.server import PlaygroundServer
from milestone_llm.lab.playground.service import Playground, presets
from milestone_llm.lab.playground.setting import Setting
from milestone_llm.lab.playground.simulate import run_setting
from milestone_llm.trace.jsonl import read_run

IDLE = "() => !lab.isAsked && !lab.isDue"


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[PlaygroundServer] = []

    def start(file: Path | None = None) -> str:
        server = PlaygroundServer(Playground(OwnFile(file, InAProcess) if file else None), 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        return server.url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def figures(opened: Opened) -> list[dict[str, float]]:
    opened.page.wait_for_function(IDLE)
    return opened("() => lab.head.sides.map((side) => side.figures)")


def drag(opened: Opened, selector: str, pixels: int) -> None:
    box = opened.page.locator(selector).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    mouse = opened.page.mouse
    mouse.move(x, y)
    mouse.down()
    mouse.move(x + pixels / 2, y)
    mouse.move(x + pixels, y)
    mouse.up()


def test_a_preset_is_drawn_by_the_explorer_and_its_figures_are_the_simulations(browser, serve):
    opened = Opened(browser, serve())
    for index in (0, 4):
        opened.page.select_option("#play-preset", str(index))
        opened.page.wait_for_function(
            f"() => views[0].run.meta.label && lab.head.link.includes("
            f"{json.dumps(presets()[index]['question'].split()[-1][:-1])})"
        )
        outcomes = run_setting(Setting.of(presets()[index]))
        assert figures(opened) == [outcome.figures for outcome in outcomes]
        counts = "() => views.map((view) => view.run.records.length)"
        assert opened(counts) == [len(outcome.records) for outcome in outcomes]
    assert opened.page.locator("#play-figures tr.shows").count() == 2
    opened.page.click("#play-tell")
    assert opened.page.inner_text("#play-answer") == presets()[4]["answer"]
    opened.page.click("#guess")
    assert not opened.page.is_visible("#play-figures"), "they tell the end"
    opened.page.click("#guess")
    assert opened.errors == []


def test_requests_are_dragged_pulled_longer_added_copied_and_deleted(browser, serve):
    opened = Opened(browser, serve())
    first = "() => lab.setting.requests[0]"
    before, figures_before = opened(first), figures(opened)
    drag(opened, "[data-index='0'] [data-drag=output]", 60)
    assert opened(first)["output"] > before["output"]
    assert figures(opened) != figures_before
    assert opened.page.input_value("#play-preset") == "", "the preset's answer may not hold"
    assert opened.page.locator("#play-figures tr.shows").count() == 0
    drag(opened, "[data-index='0'] [data-drag=prompt]", 40)
    assert opened(first)["prompt"] > before["prompt"]
    drag(opened, "[data-index='3'] [data-drag=arrival]", -400)
    assert opened("() => lab.setting.requests.map((each) => each.arrival)") == [0, 0, 0, 0]
    opened.page.fill("[data-focus='arrival:0']", "2.5")
    opened.page.keyboard.press("Tab")
    opened.page.wait_for_function(IDLE)
    assert opened("() => lab.setting.requests.at(-1).arrival") == 2.5
    assert opened("() => document.activeElement.dataset.focus") == "prompt:3", "now it is the last"
    opened.page.focus("[data-index='1'] [data-drag=output]")
    output = opened("() => lab.setting.requests[1].output")
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("PageUp")
    assert opened("() => lab.setting.requests[1].output") > output + 1
    for button, count in (("#play-add", 5), ("[data-copy='1']", 6), ("[data-delete='2']", 5)):
        opened.page.click(button)
        assert opened.page.locator("[data-index]").count() == count
        assert figures(opened)
        assert opened("() => views[0].run.requests.size") == count
    opened.page.click("#play-random")
    opened.page.fill("#play-dice [name=count]", "9")
    opened.page.click("#play-dice button")
    opened.page.wait_for_selector("[data-index='8']")
    assert figures(opened)
    assert opened.errors == []


@pytest.mark.slow
def test_fields_engines_and_machines_are_changed_and_a_link_opens_the_same(browser, serve):
    url = serve()
    opened = Opened(browser, url)
    opened.page.select_option("[data-field=engine][data-of='1']", "m4_prefix_chunked")
    opened.page.fill("[data-field=max_num_seqs][data-of='1']", "2")
    opened.page.keyboard.press("Tab")
    opened.page.click("#play-engines summary")
    opened.page.select_option("[data-field=enable_prefix_caching][data-of='1']", "false")
    opened.page.select_option("#play-machine", "h200")
    side = {"max_num_seqs": 2, "max_model_len": 128, "enable_prefix_caching": False}
    assert opened("() => lab.setting.sides[1].fields") == side
    expected = figures(opened)
    link = opened("() => lab.head.link")
    opened.page.wait_for_function("() => location.hash.length > 2")
    again = Opened(browser, url + link)
    assert figures(again) == expected
    again.page.click("#play-beside")
    assert len(figures(again)) == 1
    assert opened.errors == again.errors == []


@pytest.mark.slow
def test_bad_numbers_are_told_in_a_line_and_can_be_mended(browser, serve):
    opened = Opened(browser, serve())
    opened.page.fill("[data-field=max_num_seqs][data-of='0']", "0")
    opened.page.keyboard.press("Tab")
    opened.page.wait_for_selector("#play-problem:not([hidden])")
    assert opened.page.inner_text("#play-problem").endswith(
        "max_num_seqs must be at least 1, got 0"
    )
    assert opened("() => views.length") == 2, "the last run stays"
    assert opened("() => document.body.classList.contains('stale')")
    opened.page.fill("[data-field=max_num_seqs][data-of='0']", "3")
    opened.page.keyboard.press("Tab")
    opened.page.wait_for_selector("#play-problem", state="hidden")
    for prompt, is_stale in (("0.5", True), ("8", False)):
        opened.page.fill("[data-focus='prompt:0']", prompt)
        opened.page.keyboard.press("Tab")
        opened.page.wait_for_function(IDLE)
        assert opened("() => document.body.classList.contains('stale')") is is_stale
    compared = opened.page.locator("#play-figures td:last-child")
    assert any(compared.all_inner_texts())
    opened(
        "() => drawFigures(lab.head.sides.map((side, of) => ({ ...side, problem: of && 'broke' })))"
    )
    assert not any(compared.all_inner_texts()), "the beginning of a run is not compared with a run"
    bad = Opened(browser, serve() + "#{%22requests%22:3}")
    assert "requests" in bad.page.inner_text("#play-problem")
    assert bad("() => lab.setting.requests.length") == 4, "the first preset"


@pytest.mark.slow
def test_a_preset_and_a_trace_are_saved_and_a_preset_is_opened(browser, serve, tmp_path):
    opened = Opened(browser, serve())
    for what, name in (("preset", "playground.json"), ("trace", "playground.jsonl")):
        with opened.page.expect_download() as saved:
            opened.page.click(f"[data-save={what}] >> nth=0")
        saved.value.save_as(tmp_path / name)
    assert len(read_run(tmp_path / "playground.jsonl")) == 80
    data = json.loads((tmp_path / "playground.json").read_text("utf-8"))
    assert run_setting(Setting.of(data))[0].figures == figures(opened)[0]
    data["requests"] = data["requests"][:2]
    (tmp_path / "playground.json").write_text(json.dumps(data))
    opened.page.set_input_files("#play-open", tmp_path / "playground.json")
    opened.page.wait_for_selector("[data-index='2']", state="detached")
    assert opened.errors == []


def save(path: Path, text: str) -> None:
    """All at once, as editors do: the server never sees half a file."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_a_saved_scheduler_runs_beside_the_old_one(browser, serve, tmp_path):
    path = tmp_path / "mine.py"
    lines = "from m2_batching.scheduler import Scheduler\n\nclass Mine(Scheduler):\n    pass\n"
    save(path, lines)
    opened = Opened(browser, serve(path))
    engines = "() => lab.setting.sides.map((side) => side.engine)"
    opened.page.wait_for_function("() => lab.setting.sides[1]?.engine === 'own'")
    assert opened(engines) == ["m2_batching", "own"]
    theirs, mine = figures(opened)
    assert theirs == mine
    body = "def reason_to_wait(self, request, budget):\n"
    body += "        return 'one at a time' if self.running else None\n"
    save(path, lines.replace("pass", body))
    opened.page.wait_for_function("() => lab.setting.sides[0].engine === 'own before'")
    old, new = figures(opened)
    assert old == mine
    assert new["makespan"] > old["makespan"]
    save(path, lines.replace("pass", "def schedule(self):\n        return None.rows"))
    opened.page.wait_for_selector("#play-problem:not([hidden])")
    told = opened.page.inner_text("#play-problem")
    assert "step 0: AttributeError: 'NoneType' object has no attribute 'rows'" in told
    assert "mine.py, line 5: return None.rows" in told


CUT_OFF = """() => [...document.querySelectorAll("#part select")].filter((each) => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = getComputedStyle(each).font;
  return context.measureText(each.selectedOptions[0].textContent).width > each.clientWidth - 18;
}).map((each) => each.value)"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1024, 1400])
def test_the_page_is_whole_and_accessible_at_any_width(browser, serve, width):
    opened = Opened(browser, serve(), viewport={"width": width, "height": 900})
    for preset in ("3", "9"):  # the longest question, the longest engine
        opened.page.select_option("#play-preset", preset)
        assert opened(CUT_OFF) == []
    opened.page.click("#play-random")
    opened.page.click("#play-tell")
    assert_whole_and_accessible(opened)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Host": "evil.example"}, b"{}", 403),
        ({"Origin": "http://evil.example"}, b"{}", 403),
        ({"Content-Type": "text/plain"}, b"{}", 403),
        ({"Content-Length": str(2**21)}, b"{}", 413),
        ({}, b'{"seed": ' + b"9" * 5000 + b"}", 400),
        ({}, b'{"requests": [{}], "sides": [{}]}', 200),
    ],
)
def test_other_sites_and_bad_bodies_are_turned_away(headers, body, status, serve):
    port = int(serve().rsplit(":", 1)[1].strip("/"))
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/run", body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    assert answer.status == status
    assert "frame-ancestors 'none'" in answer.getheader("Content-Security-Policy")
    assert "require-trusted-types-for 'script'" in answer.getheader("Content-Security-Policy")
    connection.close()


def test_in_chinese_it_keeps_its_language_and_asks_the_presets_questions(browser, serve):
    opened = Opened(browser, f"{serve()}?lang=zh")
    opened.page.select_option("#play-preset", label="谁会饿死？")
    assert figures(opened)
    opened("() => byId('play-tell').click()")
    assert opened.page.inner_text("#play-answer").startswith("r2 不急（优先级 5）")
    assert "平均，秒" in opened.page.inner_text("#play-figures")
    opened.page.wait_for_function("() => location.hash.length > 1")
    assert opened("() => location.search") == "?lang=zh"
    assert opened.errors == []
