"""The page that replays a run, in headless Chromium: what it shows is what the engine did."""

from __future__ import annotations

import json
import random
import re
import threading
from dataclasses import fields, is_dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
import m5_kernels
from docs import scene
from helpers.engines import every_milestone, greedy, make_engine, tiny_model
from helpers.pages import ENGLISH, Opened, assert_whole_and_accessible
from helpers.read_back import ReadBackRunner
from m4_prefix_chunked.hybrid.hybrid_cache import HybridKVCacheManager
from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from milestone_llm.core.kv import NULL_BLOCK, tables_of
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.lab.explorer import __main__ as explore
from milestone_llm.lab.explorer.live import LiveTrace
from milestone_llm.lab.explorer.page import (
    LiveSource,
    Run,
    chinese_words,
    explorer_html,
    in_the_page_of_today,
    write_page,
)
from milestone_llm.lab.explorer.positions import useful_share
from milestone_llm.lab.plots.block_history import kv_during_steps
from milestone_llm.models.tiny_models import build_tiny_model
from milestone_llm.trace.jsonl import read_run
from milestone_llm.trace.records import StepRecord

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"


class WatchedRunner(ReadBackRunner):
    """Notes at every launch what the scheduler's books say, and why somebody had to wait."""

    def __init__(self, block_size: int | None) -> None:
        super().__init__(block_size)
        self.owners: list[dict[str, list[str]]] = []
        self.reasons: list[dict[str, str]] = []
        self.needs: list[dict[str, int]] = []
        self._pending: dict[str, str] = {}

    def watch(self, scheduler: Any) -> None:
        """Look at the plans of this scheduler."""
        self.scheduler = scheduler
        ask = scheduler.reason_to_wait

        def asked(request: Any, *limits: Any) -> str | None:
            reason = ask(request, *limits)
            if reason is not None:
                self._pending[request.request_id] = reason
            return reason

        plan = scheduler.schedule

        def planned() -> StepPlan:
            self._pending = {}  # of a plan that was empty
            here = [*self.scheduler.running, *self.scheduler.waiting]
            self._needs = {each.request_id: each.num_uncomputed_tokens for each in here}
            return plan()

        scheduler.reason_to_wait = asked
        scheduler.schedule = planned

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Note, then launch."""
        kv, running = self.scheduler.kv, self.scheduler.running
        has_tables = hasattr(kv, "blocks_of")  # from m2_batching on
        tables = {r.request_id: kv.blocks_of(r) for r in running} if has_tables else {}
        owners: dict[str, list[str]] = {}
        for name in sorted(tables):
            for block in {*chain.from_iterable(tables_of(tables[name]))} - {NULL_BLOCK}:
                owners.setdefault(str(block), []).append(name)
        self.owners.append(owners)
        self.reasons.append(self._pending)
        self.needs.append(self._needs)
        self._pending = {}
        return super().launch(plan)


def random_run(
    package: Any, seed: int = 0, model: Any = None, **fields: Any
) -> tuple[Any, WatchedRunner]:
    """Traffic on little memory: preemptions, swaps, shared prefixes, completions, aborts."""
    rng = random.Random(seed)
    number = int(package.__name__[1])
    if number >= 3:
        fields = {"block_size": 4, "kv_cache_tokens": 48, "preemption": "swap"} | fields
    if number >= 4:
        fields = {"max_num_batched_tokens": 20} | fields
    runner = WatchedRunner(fields.get("block_size"))
    fields = {"max_num_seqs": 4, "max_model_len": 40, "trace": "memory"} | fields
    engine = make_engine(package, model, runner=runner, **fields)
    if isinstance(engine.scheduler.kv, HybridKVCacheManager):
        runner.windows = LayerGroups.of_config(engine.model.config).windows
    runner.watch(engine.scheduler)
    step = 0
    while step < 60 or engine.has_unfinished_requests():
        if step < 60 and rng.random() < 0.35:
            prompt = [7] * rng.choice((0, 4, 8)) + [
                rng.randrange(3, 90) for _ in range(rng.randint(1, 9))
            ]
            n = 2 if number >= 3 and rng.random() < 0.2 else 1
            engine.add_request(prompt, greedy(rng.randint(1, 18), n=n))
        if engine.requests and rng.random() < 0.04:
            engine.abort(rng.choice(list(engine.requests)))
        engine.step()
        step += 1
    return engine, runner


def page_of(tmp_path: Path, engine: Any) -> str:
    """The page's address."""
    return write_page([Run.of(engine.milestone, engine)], tmp_path / "run.html").as_uri()


OWNERS = """() => views[0].run.records.map((_, at) => {
  const state = memoryAt(views[0].run, at), owners = {};
  if (state.owners) for (const [block, names] of state.owners) owners[block] = [...names].sort();
  return owners;
})"""
FOUND = """() => views[0].run.records.map((_, at) => {
  const { owners, cached } = memoryAt(views[0].run, at);
  return [...cached].filter((block) => !owners.has(block)).length;
})"""
USAGE = "() => views[0].run.usage.map((each) => [each.stored, each.reserved])"
REASONS = "waits => waits.map(([at, name]) => whyWaits(views[0].run, at, name))"
NEEDS = """() => views[0].run.records.slice(1).map((_, at) => Object.fromEntries(
  candidates(views[0].run, at).map((name) => [name, numUncomputed(views[0].run, at, name)])))"""
ASKED = "() => views[0].run.records.slice(1).map((_, at) => nextChange(views[0].run, at) === at)"


@every_milestone
def test_the_page_shows_what_the_engine_did_at_every_step(package, browser, tmp_path):
    """Owners of blocks, reasons to wait, KV use, and what the next step had to compute."""
    fields = {"preemption": "recompute"} if package is m3_paged else {}  # else swap
    engine, runner = random_run(package, seed=8, **fields)
    records = engine.tracer.records
    opened = Opened(browser, page_of(tmp_path, engine))
    assert len(records) == len(runner.owners) > 40
    for record, owners, expected in zip(records, opened(OWNERS), runner.owners, strict=True):
        assert owners == expected, f"step {record.step}"
    waits = [[at, name] for at, reasons in enumerate(runner.reasons) for name in reasons]
    reasons = [reason for each in runner.reasons for reason in each.values()]
    assert opened(REASONS, waits) == reasons
    assert len(reasons) > 5
    if package is not m1_single and package is not m2_batching:
        assert sum(len(record.preempted) for record in records) > 2
    if package is not m5_kernels:  # whose records are one plan ahead
        during = kv_during_steps(records)
        assert opened(USAGE) == [[stored, stored + empty] for stored, empty, _ in during]
    share = round(100 * useful_share(records) + 1e-9)
    assert f" {share} % of the computed positions useful" in opened.page.inner_text(".run header p")
    for at, (told, needs) in enumerate(zip(opened(NEEDS), runner.needs[1:], strict=True)):
        for name in told.keys() & needs.keys():
            is_fork = "/" in name and told[name] is None  # its prompt is another's
            assert told[name] == needs[name] or is_fork, (at, name)
    is_new = [
        any("/" not in name for name in (*r.admitted, *r.resumed)) or bool(r.preempted)
        for r in records[1:]
    ]
    asked = opened(ASKED)
    assert all(is_asked for is_asked, new in zip(asked, is_new, strict=True) if new)
    assert 5 < sum(asked) < 0.7 * len(asked)
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_blocks_that_went_back_belong_to_no_request_on_the_page(browser, tmp_path, family):
    model = tiny_model(family, sliding_window=6)
    fields = {"preemption": "recompute", "kv_cache_tokens": 64}
    engine, runner = random_run(m4_prefix_chunked, 8, model, **fields)
    opened, records = Opened(browser, page_of(tmp_path, engine)), engine.tracer.records
    tables = [[row.blocks, *row.further_blocks] for record in records for row in record.batch]
    assert any(NULL_BLOCK in own[-1] for own in tables)
    for record, owners, expected in zip(records, opened(OWNERS), runner.owners, strict=True):
        assert owners == expected, f"step {record.step}"
    during = kv_during_steps(records)
    assert opened(USAGE) == [[stored, stored + empty] for stored, empty, _ in during]
    found = list(zip(opened(FOUND), [record.kv.cached for record in records], strict=True))
    own, counted = next(each for each in found if any(each))
    assert own == counted, "the first blocks that went back can be found"
    assert all(own <= counted for own, counted in found)
    assert opened.errors == []


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    engines = [random_run(package, seed=3)[0] for package in (m1_single, m2_batching)]
    prompts = {name: f"Prompt of {name}." for name in ("r0", "r1")}
    runs = [Run.of("one", engines[0], None, prompts), Run.of("two", engines[1], 2, prompts)]
    runs = [replace(run, texts={token: f" w{token}" for token in range(512)}) for run in runs]
    return write_page(runs, tmp_path_factory.mktemp("two") / "run.html").as_uri()


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    engine, _ = random_run(m3_paged)
    return page_of(tmp_path_factory.mktemp("paged"), engine), engine.tracer.records


def test_two_traces_share_one_clock_and_stand_line_by_line(browser, two_runs):
    opened = Opened(browser, two_runs)
    assert opened("() => views.map((view) => view.at)") == [2, 2], "it begins there"
    assert opened("() => { moveTo(9); return views.map((view) => view.at) }") == [9, 9]
    words = "(at) => { moveTo(at); return views[1].box.querySelector('.words').innerText; }"
    assert "Prompt of r0." in opened(words, 2)
    rows = (
        "() => views[1].run.requests.get('r1').rows.map(({ at, row }) => [at, row.sampled_token])"
    )
    tokens = [f" w{token}" for at, token in opened(rows) if at <= 9 and token is not None]
    assert tokens
    assert f"Prompt of r1.{''.join(tokens)}\n" in opened(words, 9)
    opened.page.keyboard.press("s")
    opened("() => moveTo(lastTime() / 2)")
    times = opened("() => views.map((v) => [v.run.records[v.at].start_s, state.time])")
    assert all(start <= time for start, time in times)
    first, second = opened(
        """() => views.map(({ box }) =>
          [...box.querySelectorAll(".card:not([hidden])")]
            .map((card) => card.getBoundingClientRect().top))"""
    )
    assert first == second == sorted(first)
    assert opened.errors == []


def test_everything_can_be_done_with_the_keyboard(browser, paged):
    url, records = paged
    opened = Opened(browser, url)
    press = opened.page.keyboard.press
    at = "() => views[0].at"
    press("ArrowRight")
    press("ArrowRight")
    press("ArrowLeft")
    assert opened(at) == 1
    press("End")
    assert opened(at) == len(records) - 1
    press("Home")
    opened.page.select_option("#kind", "preempted")
    opened("() => document.activeElement.blur()")
    press("n")
    first = next(index for index, record in enumerate(records) if record.preempted)
    assert opened(at) == first
    for key in "+-0adst?":
        press(key)
    opened("() => document.querySelector('.blocks canvas').focus()")
    press("ArrowRight")
    assert "block 0" in opened.page.inner_text(".tip")
    assert opened.errors == []


FILL = """([tokens, victims]) => {
  for (const line of document.querySelectorAll("[data-guess]")) {
    const [number, box] = line.querySelectorAll("input");
    number.value = tokens[line.dataset.guess] ?? 0;
    box.checked = victims.includes(line.dataset.guess);
  }
}"""
ANSWERS = "() => [...document.querySelectorAll('.answer')].map((a) => a.textContent)"


def fill_in(opened: Opened, after: StepRecord) -> None:
    """What the step did, in the form."""
    rows = [row for row in after.batch if row.phase != "padding"]
    tokens = {row.request_id: row.num_new_tokens for row in rows}
    opened(FILL, [tokens, [one["request_id"] for one in after.preempted]])


def test_a_guess_is_checked_against_the_next_step_and_its_rule_is_told(browser, paged):
    url, records = paged
    opened = Opened(browser, url)
    before = next(i for i, record in enumerate(records) if record.preempted) - 1
    opened(f"() => moveTo({before})")
    opened.page.keyboard.press("g")
    assert opened("() => getComputedStyle(document.querySelector('.veil')).display") == "block"
    opened.page.keyboard.press("ArrowRight")
    box = opened.page.locator(".rows canvas").bounding_box()
    opened.page.mouse.click(box["x"] + 0.95 * box["width"], box["y"] + 10)
    assert opened("() => views[0].at") == before, "the next step stays hidden"
    fill_in(opened, records[before + 1])
    opened.page.click("#check")
    answers = opened(ANSWERS)
    assert answers
    assert all(answer.startswith("✓") for answer in answers), answers
    for victim in records[before + 1].preempted:
        assert any(victim["reason"] in answer for answer in answers)
    assert any("the one admitted last is preempted" in answer for answer in answers)
    opened.page.click("#check")
    assert opened("() => views[0].at") == before + 1
    assert "1 of 1 step right" in opened.page.inner_text("#guessing")
    assert opened.errors == []


@pytest.mark.slow
def test_a_step_budget_is_learnt_from_a_reason_to_wait(browser, tmp_path):
    engine = make_engine(m2_batching, max_model_len=20, max_num_batched_tokens=24, trace="memory")
    engine.generate([[5] * 9, [6] * 12, [7] * 8, [8] * 11], greedy(4))
    told = [text for each in engine.tracer.records for text in each.waiting_reasons.values()]
    assert any("left in this step" in text for text in told)
    page = write_page([Run("no budget", engine.tracer.records)], tmp_path / "run.html")
    opened = Opened(browser, page.as_uri())
    assert opened("() => views[0].run.meta.budget") == 24


def test_a_step_of_experts_says_how_many_were_met(browser, tmp_path):
    engine = make_engine(m5_kernels, build_tiny_model("qwen3-moe"), trace="memory")
    engine.generate([[5, 6, 7]], greedy(2))
    records = engine.tracer.records
    opened = Opened(browser, write_page([Run("experts", records)], tmp_path / "run.html").as_uri())
    for at, record in enumerate(records):
        opened(f"() => moveTo({at})")
        assert f"{record.expert_load['num_met']:.1f} of 8 experts met" in opened.page.inner_text(
            "body"
        )
    assert opened.errors == []


# --- the device's own times ----------------------------------------------------------------------

TRACES = [ROOT / "docs" / "traces" / f"m5_h200_{way}.jsonl.gz" for way in ("launched", "graphs")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page that `make pages` makes of M5."""
    page = tmp_path_factory.mktemp("recorded") / "m5.html"
    labels = ["--labels", "one by one,graphs", "--max-num-batched-tokens", "4096"]
    assert explore.main([*map(str, TRACES), *labels, "-o", str(page)]) == 0
    return page.as_uri()


@pytest.mark.slow
def test_recorded_traces_show_launches_gaps_and_the_pipeline(browser, recorded):
    opened = Opened(browser, recorded)
    shown = """(at) => { moveTo(at); return views.map(({ box }) => ({
      text: box.querySelector(".device").textContent,
      host: [...box.querySelectorAll(".lane")[0].querySelectorAll("[title]")]
        .sort((one, other) => parseFloat(one.style.left) - parseFloat(other.style.left))
        .map((part) => part.title),
      device: box.querySelectorAll(".lane")[1].querySelectorAll("[title]").length,
    })); }"""
    for at in (0, 6, 9, 21):
        for told, path in zip(opened(shown, at), TRACES, strict=True):
            device = read_run(path)[at].device
            assert device is not None
            assert f"{device['num_launches']} launches" in told["text"]
            assert f"{device['num_kernels']} kernels and copies" in told["text"]
            assert told["device"] >= len(device["kernels"])
            assert any(title.startswith(f"launch {at}:") for title in told["host"])
    mixed = opened(shown, 6)
    assert ["CUDA graph" in each["text"] for each in mixed] == [False, True]
    assert all("a mixed step" in each["text"] for each in mixed)
    ahead = [[t.split(":")[0] for t in each["host"]] for each in opened(shown, 9)]
    assert "launch 10" not in ahead[0]
    assert ahead[1].index("launch 10") < ahead[1].index("wait 9"), "launched before 9 is settled"
    opened("() => { toggleGuess(); moveTo(9); }")
    hidden = opened("() => [...document.querySelectorAll('.lane [title]')].map((e) => e.title)")
    assert not any("10:" in title for title in hidden)
    assert opened.errors == []


RECORDED = sorted(path for path in PAGES.glob("*.html") if path.name != "index.html")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_runs_are_in_the_page_of_today(path):
    page = path.read_text(encoding="utf-8")
    assert re.findall(r'(?:href|src)="(?!data:)[^"]+"', page) == [], "it asks for nothing else"
    if page != in_the_page_of_today(path):
        again = "python -m milestone_llm.lab.explorer $page -o $page"
        pytest.fail(f"the page has changed: for page in docs/pages/[mv]*.html; do {again}; done")


def test_recorded_runs_are_linked():
    index = (PAGES / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'(?:href|src)="([^"]+)"', index)
    assert sorted(links) == [path.name for path in RECORDED]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1024, "dark"), (1400, "light")])
def test_pages_are_whole_and_accessible_at_any_width(
    browser, paged, two_runs, recorded, width, scheme
):
    for url in (paged[0], two_runs, recorded):
        size = {"width": width, "height": 900}
        opened = Opened(browser, url, viewport=size, color_scheme=scheme)
        opened("() => { moveTo(9); toggleGuess(); toggleHelp(); }")
        assert_whole_and_accessible(opened)


@pytest.mark.slow
def test_the_batch_says_which_positions_are_written_to_which_blocks(browser, paged):
    url, records = paged
    opened = Opened(browser, url)
    cells = """(at) => {
      moveTo(at);
      return [...document.querySelectorAll("[data-panel=batch] tr[data-row]")].map((line) => [
        [...line.cells].map((cell) => cell.textContent),
        [...line.querySelectorAll(".table b")].map((each) => Number(each.textContent)),
      ]);
    }"""
    for at, record in enumerate(records[:20]):
        for (texts, written), row in zip(opened(cells, at), record.batch, strict=True):
            many = row.num_new_tokens > 1
            last = f"{row.start}–{row.end - 1} (+{row.num_new_tokens})"
            assert (last if many else str(row.start)) in texts
            assert "".join(f"{block} " for block in row.blocks) in texts
            assert written == row.blocks[row.start // 4 : (row.end - 1) // 4 + 1]


MARKUP = '<img src=x onerror="window.isRun = true"></script><script>window.isRun = true</script>'
MARKUP += "<!--\u2028</title></style><b data-evil>"
FIELDS = ("request_id", "reason", "priority", "num_tokens", "hashes")
"""Keys of dictionaries that are no text of a trace."""


def marked_up(record: StepRecord) -> StepRecord:
    """A record with markup wherever a text may be, in places that no file of ours has, too."""

    def spoiled(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {spoiled(key): spoiled(own, name) for key, own in value.items()}
        if isinstance(value, list):
            return [spoiled(each, name) for each in value]
        if is_dataclass(value):
            names = [each.name for each in fields(value)]
            return replace(cast(Any, value), **{n: spoiled(getattr(value, n), n) for n in names})
        keep = ("unit", "milestone")  # of `unit` there are three drawings
        is_text = isinstance(value, str) and name not in keep
        return value + MARKUP if is_text and value not in FIELDS else value

    return spoiled(record)


def is_run(opened: Opened) -> Any:
    """Whether markup of a trace has become elements, or has run, in any step of the page."""
    return opened(
        """() => {
          toggleHelp(); toggleGuess(); toggleGuess();
          for (let at = 0; at <= lastTime(); at++) { moveTo(at); jump(1); moveTo(at); }
          toggleGuess(); moveTo(0); document.querySelector("#check")?.click();
          const evil = "img, [data-evil], body script:not([type]):not(:last-of-type)";
          return [window.isRun ?? false, document.querySelectorAll(evil).length];
        }"""
    )


@pytest.mark.parametrize("package", [m1_single, m3_paged])
def test_markup_in_any_text_of_a_trace_is_shown_and_not_run(package, browser, tmp_path):
    engine, _ = random_run(package)
    records = [marked_up(record) for record in engine.tracer.records]
    texts = {row.sampled_token or 0: MARKUP for record in records for row in record.batch}
    run = Run(MARKUP, records, texts=texts)
    opened = Opened(browser, write_page([run], tmp_path / "run.html").as_uri())
    assert is_run(opened) == [False, 0]
    assert opened.page.text_content(".run h2") == MARKUP
    assert opened("() => document.querySelector('.who').dataset.who").endswith(MARKUP)
    assert opened.errors == []


def test_the_pages_own_policy_refuses_markup_and_further_scripts(browser, paged):
    opened = Opened(browser, paged[0])
    said = opened(
        """() => {
          const script = document.createElement("script");
          try { script.textContent = "window.isRun = true"; } catch {}
          document.body.append(script);
          try { document.body.innerHTML = "<b></b>"; return "parsed"; }
          catch (error) { return [error.name, window.isRun ?? false]; }
        }"""
    )
    assert said == ["TypeError", False]


# --- live ----------------------------------------------------------------------------------------


class Server:
    """Answers with the page, and with records as they come for whoever has the key."""

    def __init__(self, live: LiveTrace) -> None:
        server = self
        self.done = threading.Event()
        self.bodies: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/":
                    self.answer(200, explorer_html(live=LiveSource("/trace", "tiny", 64)).encode())
                elif self.headers.get("Authorization") != "Bearer secret":
                    self.answer(401, b"")
                else:
                    self.send_response(200)
                    self.end_headers()
                    with live.subscribe() as lines:
                        while not server.done.is_set():
                            if (line := lines.get(timeout=0.05)) is not None:
                                self.wfile.write(line.encode() + b"\n")

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                server.bodies.append(json.loads(self.rfile.read(size)))
                events = [{"choices": [{"text": half}]} for half in (MARKUP[:9], MARKUP[9:])]
                lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                self.answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/"

    def close(self) -> None:
        self.done.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def test_a_live_page_asks_for_the_key_grows_with_the_run_and_runs_no_markup(browser):
    records = [marked_up(record) for record in random_run(m3_paged)[0].tracer.records[:40]]
    live = LiveTrace(max_records=20, decode=lambda token_ids: MARKUP)
    for record in records[:30]:
        live(record)
    server = Server(live)
    try:
        opened = Opened(browser, server.url)
        assert opened("() => getComputedStyle(document.querySelector('#runs')).display") == "none"
        for key in ("wrong", "secret"):
            opened.page.fill("#key", key)
            opened.page.keyboard.press("Enter")
            if key == "wrong":
                opened.page.wait_for_selector("text=That key was refused")
        opened.page.wait_for_function("() => views[0] && views[0].run.records.length === 20")
        for record in records[30:]:
            live(record)
        opened.page.wait_for_function("() => views[0].run.records.length === 30")
        opened.page.wait_for_function("() => views[0].at === 29")  # the cursor goes on with it
        step = f"step {records[-1].step} (30 of 30)"
        opened.page.wait_for_function(f"() => byId('where').textContent === '{step}'")
        assert "64" in opened.page.inner_text("[data-panel=budget]"), "the server's budget"
        shown = opened("() => views[0].run.records.map((record) => record.batch)")
        assert shown == [record.to_dict()["batch"] for record in records[10:]]
        assert opened("() => Object.keys(views[0].run.meta.texts).length") > 1, "texts of tokens"
        opened.page.fill("#prompt", "it's <b>")
        opened.page.click("#prompt-form button")
        opened.page.wait_for_function("(text) => byId('answer').textContent === text", arg=MARKUP)
        asked = {
            "model": "tiny",
            "prompt": "it's <b>",
            "max_tokens": 32,
            "temperature": 0,
            "stream": True,
        }
        assert server.bodies == [asked]
        assert """"prompt":"it'\\''s <b>\"""" in opened.page.inner_text("#curl")
        assert is_run(opened) == [False, 0]
        assert not [url for url in opened.requests if not url.startswith((server.url, "data:"))]
    finally:
        server.close()


@pytest.mark.parametrize("name", ["m2", "m3"])
def test_a_page_is_in_chinese_if_its_address_says_so(browser, name):
    opened = Opened(browser, (PAGES / f"{name}.html").as_uri() + "?lang=zh")
    assert opened.page.get_attribute("html", "lang") == "zh-Hans"
    said = set(opened(ENGLISH))
    opened("() => toggleHelp()")
    for _ in range(12):
        opened("() => jump(1)")
        said |= set(opened(ENGLISH))
    opened("() => toggleGuess()")
    opened.page.click("#check")
    said |= set(opened(ENGLISH))
    assert said == set()
    opened.page.set_viewport_size({"width": 390, "height": 900})
    opened.page.wait_for_function("() => document.documentElement.scrollWidth === 390")
    assert opened.errors == []


@pytest.mark.parametrize("table", [chinese_words(), scene.chinese()], ids=["replays", "scene"])
def test_a_chinese_text_has_a_place_for_each_number_and_name_of_the_english(table):
    for english, chinese in table.items():
        holes = [re.findall(r"\{\d?n?\}", text) for text in (english, chinese)]
        assert len(holes[0]) == len(holes[1]), english
        assert not re.search(r"[,;:?!] ?[\u4e00-\u9fff]", chinese), chinese
