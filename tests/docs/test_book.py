"""The book for a browser has all chapters whole, and a link that leads nowhere is noticed."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from docs.book import CHINESE, ENGLISH, ROOT, Book, _lexer, broken_links, contents, target
from helpers.pages import Opened, assert_accessible


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Building it fails if a link in it leads nowhere.

    Colours take longest: of whole files, only schedulers have some.
    """
    book = Book(tmp_path_factory.mktemp("book"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("docs.book._lexer", lambda name: _lexer(name if is_colored(name) else "text"))
        book.build()
    return book


def is_colored(name):
    return "." not in name or name == "scheduler.py"


def test_the_book_has_every_chapter_with_its_tables_and_its_code(book):
    listed = {page for _, pages in contents(ENGLISH) for page in pages}
    in_chinese = {page for _, pages in contents(CHINESE) for page in pages}
    translated = {page.relative_to(ROOT) for page in (ROOT / "docs/zh").glob("*.md")}
    assert {PurePosixPath(page) for page in translated} <= in_chinese
    listed |= in_chinese
    assert {PurePosixPath("docs", page.name) for page in (ROOT / "docs").glob("*.md")} <= listed
    for page in listed:
        source = (ROOT / page).read_text(encoding="utf-8")
        text = book.pages[target(page)]
        tables = re.sub(r"```.*?```", "", source, flags=re.S)
        assert text.count("<table>") == len(re.findall(r"^\|[-| :]+\|$", tables, re.M)), page
        assert text.count('<table class="head">') == source.startswith("---"), page
        assert "command: " not in "".join(re.findall("<h[1-6].*?</h", text)), page
        assert text.count("<details>") == source.count("<details>"), page
        assert text.count('class="replay"') == source.count("<!-- replay:"), page
        assert "mermaid" not in text, page
    docs = book.pages[PurePosixPath("docs/using.html")]
    assert 'href="../milestone_llm/core/engine_core.py.html#L' in docs


def test_the_chinese_book_opens_replays_and_the_scene_in_chinese(book):
    home = book.pages[PurePosixPath("README.zh.html")]
    assert 'href="docs/pages/index.html?lang=zh"' in home
    assert 'src="docs/pages/m2.html?lang=zh#embed"' in home
    chapter = book.pages[PurePosixPath("docs/zh/m1_single.html")]
    assert 'static-batch-waste.html?lang=zh#embed" title="静态批处理浪费什么？"' in chapter
    assert 'href="../../index.zh.html#m1"' in chapter
    assert "lang=zh" not in book.pages[PurePosixPath("docs/m1_single.html")]
    scene = book.pages[PurePosixPath("index.zh.html")]
    assert 'href="docs/zh/index.html" data-link="all chapters"' in scene
    assert 'id="language" lang="en" href="index.html"' in scene


def test_a_page_of_the_book_asks_no_other_server(book):
    for place, text in book.pages.items():
        loaded = re.findall(r'<(?:script|iframe|img|link)\b[^>]*?(?:src|href)="([^"]*)"', text)
        assert not [each for each in loaded if each.startswith(("http", "//", "/"))], place
    assert "http" not in (book.folder / "book.css").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "link", ["none.html", "#none", "index.html#L99", "https://else.where/x.js"], ids=str
)
def test_a_link_that_leads_nowhere_is_noticed(tmp_path, link):
    (tmp_path / "index.html").touch()
    kind = "src" if link.startswith("http") else "href"
    pages = {PurePosixPath("index.html"): f'<p id="here"><a {kind}="{link}"><a href="#here">'}
    assert len(list(broken_links(pages, tmp_path))) == 1


@pytest.mark.slow
def test_the_book_opens_from_disk_and_is_searched_by_keyboard(browser, book):
    opened = Opened(browser, (book.folder / "docs/m3_paged.html").as_uri())
    page = opened.page
    assert page.inner_text("nav [aria-current]") == "M3: paged KV memory"
    page.keyboard.press("/")
    page.keyboard.type("preemption swap")
    assert "Preemption" in page.inner_text("#found li >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_url("**#preemption")
    for asked, first in (
        ('"stop strings"', "stop strings"),
        ("BlockManager", "class BlockManager"),
    ):
        page.fill("#find", asked)
        assert first in page.inner_text("#found li >> nth=0")
    page.click("main a[href*='scheduler.py.html']")
    page.wait_for_url("**/scheduler.py.html*")
    theme = opened("() => document.documentElement.dataset.theme")
    page.click("#theme")
    other = opened("() => document.documentElement.dataset.theme")
    assert other != theme
    page.go_back()
    replay = page.frame_locator(".replay iframe >> nth=0")
    replay.locator(f":root[data-theme={other}]").wait_for()
    opened("() => byId('theme').click()")
    replay.locator(f":root[data-theme={theme}]").wait_for()
    page.wait_for_function("() => frames.every((each) => each.dataset.height)")
    assert replay.locator(".timeline:visible").count() == 2
    assert replay.locator(":root").evaluate("(root) => root.scrollHeight <= innerHeight")
    page.set_viewport_size({"width": 390, "height": 900})
    assert opened("() => document.documentElement.scrollWidth") == 390
    page.click("#menu")
    page.click("nav a:text('Glossary')")
    page.wait_for_url("**/glossary.html")
    page.goto((book.folder / "docs/m3_paged.html").as_uri())
    page.click("main a[href*='index.html#m3']")
    page.wait_for_selector("#scene[data-ready]")
    assert page.input_value("#scene-milestone") == "3"
    assert opened("() => document.documentElement.scrollWidth") == 390
    assert {request[:7] for request in opened.requests} == {"file://"}
    assert opened.errors == []


@pytest.mark.slow
def test_sliders_of_a_load_work_by_keyboard_on_a_phone_in_the_dark(browser, book):
    phone, url = {"width": 390, "height": 844}, (book.folder / "docs/sizing.html").as_uri()
    opened = Opened(browser, url, phone, color_scheme="dark")
    page, rows = opened.page, "#sizing tr[data-gpu=h100] td:nth-of-type(2)"
    assert opened("document.documentElement.scrollWidth") == 390
    assert page.inner_text(rows) == "32"
    page.focus("#rows")
    page.keyboard.press("ArrowRight")
    assert (page.inner_text(rows), page.inner_text("output[for=rows]")) == ("33", "33")
    page.select_option("[name=model]", "llama-3.3-70b")
    assert page.inner_text("#sizing tr[data-gpu=h100]").count("too little memory") == 1
    assert page.is_hidden("#sizing button")  # the scheduler needs a web server
    assert opened.errors == []


@pytest.mark.slow
def test_the_language_changes_at_the_same_heading_and_chinese_is_searched(browser, book):
    opened = Opened(browser, (book.folder / "docs/glossary.html").as_uri() + "#prefix-cache")
    page = opened.page
    opened("() => byId('language').click()")
    page.wait_for_url("**/docs/zh/glossary.html#prefix-cache")
    assert page.get_attribute("html", "lang") == "zh-Hans"
    page.fill("#find", "前缀缓存")
    assert "前缀缓存（prefix cache）" in page.inner_text("#found li >> nth=0")
    page.fill("#find", "KV缓存")  # pages have a space there
    assert "KV 缓存" in page.inner_text("#found li >> nth=0")
    assert opened("() => termsOf('KV缓存命中')") == ["kv", "缓存", "存命", "命中"]
    page.fill("#find", "没有这种说法")
    assert page.inner_text("#found") == "没有找到。"
    page.fill("#find", "prefix cache")
    addresses = page.eval_on_selector_all("#found a", "links => links.map((each) => each.href)")
    assert any("/zh/glossary" in each for each in addresses)
    assert not any("docs/glossary" in each for each in addresses)
    opened("() => byId('language').click()")
    page.wait_for_url("**/docs/glossary.html*")
    assert opened.errors == []


@pytest.mark.slow
def test_the_scene_changes_its_language_at_the_same_engine(browser, book):
    opened = Opened(browser, (book.folder / "docs/zh/m3_paged.html").as_uri())
    page = opened.page
    page.click("main a[href*='index.zh.html']")
    for sentence in ("同样的内存", "The same memory", "同样的内存"):
        page.wait_for_selector("#scene[data-ready]")
        assert page.inner_text("#scene-told").startswith(sentence)
        page.click("#language")
        page.wait_for_url(lambda url: url.endswith("#m3"))
    assert opened.errors == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "index.html",
        "index.zh.html",
        "docs/m5_kernels.html",
        "docs/sizing.html",
        "docs/zh/m1_single.html",
        "m3_paged/scheduler.py.html",
    ],
)
def test_axe_finds_nothing_serious_in_the_book(browser, book, place):
    assert_accessible(Opened(browser, (book.folder / place).as_uri()))
