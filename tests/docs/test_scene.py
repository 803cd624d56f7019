"""The first page of the book: four engines at one second, with the plans of their schedulers."""

from __future__ import annotations

import functools
import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from docs import scene
from docs.book import ASSETS, ROOT
from exercises.museum.rooms import SYMPTOMS
from helpers.pages import ENGLISH, Opened, assert_accessible
from milestone_llm.lab.playground.service import Playground
from milestone_llm.lab.playground.setting import Setting
from milestone_llm.lab.playground.simulate import run_setting

LINKS = dict.fromkeys(["playground", "course", "chapter", "museum"], "#")
WORKER = """
onmessage = async ({ data: { id, path, body } }) => {
  const answer = await fetch(path, { method: "POST", body: JSON.stringify(body) });
  postMessage({ id, isFine: answer.ok, text: await answer.text() });
};
postMessage({ isReady: true });
"""
"""Takes the place of the worker with Python for a browser, which a slow test packs and asks."""


class Handler(SimpleHTTPRequestHandler):
    """Serves the page, and answers what it asks, as the playground does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(Playground().answers[self.path](body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scene")
    (folder / "play").mkdir()
    (folder / "play" / "worker.js").write_text(WORKER)
    (folder / "scene.js").write_text(scene.script())
    style = "".join((ASSETS / name).read_text() for name in ("book.css", "scene.css"))
    theme = "document.documentElement.dataset.theme = /dark/.exec(location.search) ?? 'light'"
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>Scene</title><link rel="icon" href="data:,"><style>{style}</style>'
        f'<script>{theme}</script><body class="wide-page" data-ready><nav></nav>'
        f'<main id="text">{scene.body(LINKS, True)}</main><script src="scene.js"></script>'
    )
    (folder / "index.html").write_text(page)
    handler = functools.partial(Handler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def opened_at(browser, url, place="", **options) -> Opened:
    opened = Opened(browser, url + place, **options)
    opened.page.wait_for_selector("#scene[data-ready]")
    return opened


def outcome_of(number, **changes):
    """The run of M1, M2, M3 or M4; `changes` are those of the first request."""
    setting = scene.setting(scene.SIDES[number - 1])
    setting["requests"][0] |= changes
    (outcome,) = run_setting(Setting.of(setting))
    return outcome


def tokens_by(outcome, second):
    """Number of tokens that each request has then."""
    counts = dict.fromkeys([f"r{index}" for index in range(len(scene.FIRST))], 0)
    for record in outcome.records:
        if record.start_s + record.execute_ms / 1e3 <= second:
            for row in record.batch:
                counts[row.request_id] += row.sampled_token is not None
    return list(counts.values())


SHOWN = """() => [...document.querySelectorAll(".lane")]
  .map((lane) => lane.querySelectorAll(".token:not(.comes)").length)"""
IDLE = """() => !document.querySelector(".stale")
  && !document.querySelector("#scene-busy").textContent"""

SAID_IN_ENGLISH = """async () => {
  const english = ENGLISH;
  const said = new Set(english());
  const press = async (element) => {
    element?.click();
    await null; // the page translates what has changed before that
    english().forEach((text) => said.add(text));
  };
  for (const place of ["[data-index]:not(.comes)", ".owned", ".found", ".shared", ".block"]) {
    await press(document.querySelector(`#scene ${place}`));
    const others = document.querySelectorAll("[data-give]").length;
    for (let at = 0; at < others; at++) {
      await press(document.querySelectorAll("[data-give]")[at]);
      await press(document.querySelector("[data-back]"));
    }
  }
  return [...said];
}""".replace("ENGLISH", ENGLISH)
"""What is in English at this second, also about a token and blocks, and if they are given away."""


def test_the_runs_show_what_their_sentences_say():
    m1, m2, m3, m4 = (outcome_of(number).figures for number in (1, 2, 3, 4))
    assert m1["vain"] > 0
    assert m2["vain"] == 0
    assert m1["ttft_max"] > m2["ttft_max"] > m3["ttft_max"] > m4["ttft_max"]
    assert m2["kv_empty"] > 2 * m3["kv_empty"]
    assert (m3["cached"], m4["cached"] > 0) == (0, True)


@pytest.mark.slow
def test_the_words_are_the_models(smollm2):
    assert scene.record() == scene.recorded()


def test_one_slider_goes_from_engine_to_engine_at_the_same_second(browser, url):
    opened = opened_at(browser, url, "#m1")
    opened.page.focus("#scene-milestone")
    for number in (1, 2, 3, 4):
        assert opened.page.input_value("#scene-time") == str(scene.SECOND)
        assert opened(SHOWN) == tokens_by(outcome_of(number), scene.SECOND)
        assert f"M{number}" in opened.page.inner_text("[data-link=chapter]")
        opened.page.keyboard.press("ArrowRight")
    words = opened.page.inner_text(".lane >> nth=1 >> .words")
    assert words.startswith("The capital of France is Paris.")
    assert opened.errors == []


def test_a_token_says_in_which_slot_it_is_and_which_step_wrote_it(browser, url):
    opened = opened_at(browser, url, "#m3")
    opened.page.focus(".lane >> nth=0 >> .token >> nth=0")
    opened.page.keyboard.press("ArrowRight")
    prompt = len(scene.recorded()[0]["ids"])
    sampled, written = [
        record
        for record in outcome_of(3).records
        for row in record.batch
        if row.request_id == "r0" and row.end in (prompt + 1, prompt + 2)
    ]
    (row,) = (each for each in written.batch if each.request_id == "r0")
    entry, slot = divmod(prompt + 1, 16)
    told = opened.page.inner_text("#scene-about")
    assert f"Step {sampled.step} has sampled it" in told
    assert f"slot {slot} of block {row.blocks[entry]}, entry {entry} of r0's" in told
    assert f"Step {written.step} writes them" in told
    lit = opened.page.locator(".block:has(.lit-slot)")
    assert lit.get_attribute("data-block") == str(row.blocks[entry])
    assert opened.errors == []


def test_a_block_that_is_given_away_is_an_exhibit_of_the_museum(browser, url):
    opened = opened_at(browser, url, "#kv")
    about = functools.partial(opened.page.inner_text, "#scene-about")
    block = opened.page.locator(".block.lit").get_attribute("data-block")
    opened.page.locator(f"[data-block='{block}']").drag_to(opened.page.locator(".lane >> nth=4"))
    opened.page.wait_for_function("() => document.querySelector('#scene-about [data-back]')")
    assert f"exhibit {scene.NAMES.index('crafted_prompt') + 1}," in about()
    opened.page.focus(f"[data-block='{block}']")
    for key in ("Enter", "Tab", "Enter"):  # the first request that it can be given to
        opened.page.keyboard.press(key)
    assert "r0 → r2" in about()
    opened.page.keyboard.press("Enter")  # back
    opened.page.click("[data-give=nobody]")
    assert f"exhibit {scene.NAMES.index('free_blocks_fall') + 1}," in about()
    assert opened.errors == []


def test_ones_own_prompt_is_planned_by_the_schedulers(browser, url):
    opened = opened_at(browser, url, "#m2")
    page = opened.page
    page.fill("[data-row='0'][data-field=prompt]", "Why is the night dark? And the sea?")
    page.keyboard.press("Tab")
    page.wait_for_function(IDLE)
    assert "·" in page.inner_text(".lane >> nth=0 >> .words")
    ids = [token % 199 for token in scene.recorded()[0]["ids"]]
    begins, ends = ids[:27], ids[-5:]  # the chat template, and "Why is the"
    outcome = outcome_of(4, prompt=41, output=24, tokens=[*begins, *[1] * 9, *ends])
    page.click("[data-stop='4']")
    assert opened(SHOWN) == tokens_by(outcome, scene.SECOND)
    page.fill("[data-row='0'][data-field=arrival]", "1")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.who').textContent === 'r4'")
    page.click("#scene-again")
    page.wait_for_function(IDLE)
    words = page.inner_text(".lane >> nth=0 >> .words")
    page.fill("[data-row='0'][data-field=prompt]", "too long " * 80)
    page.keyboard.press("Enter")
    page.wait_for_selector("#scene-problem:not([hidden])")
    assert "max_model_len=128" in page.inner_text("#scene-problem")
    assert page.inner_text(".lane >> nth=0 >> .words") == words, "of the run that is shown"
    page.click("#scene-again")
    page.wait_for_function(IDLE)
    assert opened(SHOWN) == tokens_by(outcome_of(4), scene.SECOND)
    assert not page.is_visible("#scene-problem")
    assert opened.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_on_a_phone_and_stands_still_for_who_wants_that(browser, url, theme):
    phone = {"width": 390, "height": 844}
    opened = opened_at(browser, url, f"?{theme}", viewport=phone, reduced_motion="reduce")
    assert opened.page.input_value("#scene-time") == str(scene.SECOND)
    assert not opened.page.is_visible("#scene-play")
    for stop in (1, 3):
        opened.page.click(f"[data-stop='{stop}']")
        opened.page.click("[data-block='2']")
        assert opened("() => document.documentElement.scrollWidth") == phone["width"]
    assert_accessible(opened)


def test_the_table_has_nothing_that_the_page_does_not_say():
    texts = [(ASSETS / name).read_text() for name in ("scene.html", "scene.js")]
    texts += [(ROOT / "docs/book.py").read_text(), json.dumps(scene.SIDES), *SYMPTOMS.values()]
    for english in scene.chinese():
        for part in re.split(r"[rmM]?\{n?\}", english):
            assert any(part.strip().rstrip("s") in text for text in texts), english


def test_in_chinese_all_is_chinese_but_what_the_model_reads_and_writes(browser, url):
    phone = {"width": 390, "height": 844}
    opened = opened_at(browser, url, "?lang=zh#m1", viewport=phone)
    page = opened.page
    for number in (1, 2, 3, 4):
        page.click(f"[data-stop='{number}']")
        for second in range(0, int(float(page.get_attribute("#scene-time", "max"))) + 1, 2):
            page.fill("#scene-time", str(second))
            assert opened(SAID_IN_ENGLISH) == []
            assert opened("() => document.documentElement.scrollWidth") == phone["width"]
    assert page.input_value("[data-row='0'][data-field=prompt]") == next(iter(scene.FIRST))
    words = page.inner_text(".lane >> nth=1 >> .words")
    assert words.startswith("The capital of France is Paris.")
    assert opened.errors == []
