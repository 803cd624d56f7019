"""Helpers for tests of pages: a page in Chromium, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

WIDE = {"width": 1440, "height": 900}
PATIENCE_MS = 180_000


class Opened:
    """A page, and all errors on it. The page that was open before is closed.

    All share a context, which takes longer to start than a page.
    """

    def __init__(
        self, browser: Any, url: str, viewport: dict[str, int] = WIDE, **media: str
    ) -> None:
        context = browser.contexts[0] if browser.contexts else browser.new_context()
        for page in context.pages:
            page.evaluate("() => localStorage.clear()")
            page.close()
        self.page = context.new_page()
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(**media)
        self.page.set_default_timeout(PATIENCE_MS)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text))
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")

    def __call__(self, script: str, argument: Any = None) -> Any:
        """Evaluate a script in the page."""
        return self.page.evaluate(script, argument)


# Texts of a Chinese page that have English words. Names of code have _, =, or capitals.
ENGLISH = """() => {
  const found = new Set();
  const names = ["title", "aria-label", "aria-valuetext", "placeholder"];
  const kept = /\\b(tok|token|bug|playground|fcfs|stop|length)\\b/g;
  const words = /(^|[\\s(（])[a-z]{3,}($|[\\s,.:)）])/;
  const see = (text) => words.test(text.replace(kept, "")) && found.add(text.trim());
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return see(node.data);
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    if (node.matches("script, style, code, kbd, [translate=no]")) return;
    names.forEach((name) => see(node.getAttribute(name) ?? ""));
    node.childNodes.forEach(walk);
  };
  walk(document.documentElement);
  return [...found];
}"""

CUT = """() => [...document.querySelectorAll("button, select, input, label, #guessing td")]
  .filter((each) => each.offsetParent && !each.closest(".hidden, [data-panel]"))
  .filter((each) => {
    const { left, right } = each.getBoundingClientRect();
    return left < 0 || right > innerWidth || each.scrollWidth > each.clientWidth + 1;
  }).map((each) => each.outerHTML)"""


def assert_accessible(opened: Opened) -> None:
    """Assert that axe finds nothing serious."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="the accessibility test wants `pip install axe-playwright-python`",
    )
    found = axe.Axe().run(opened.page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == []


def assert_whole_and_accessible(opened: Opened) -> None:
    """Assert that nothing is wider than the window, all controls are visible, and axe finds nothing
    serious."""
    width = opened("() => innerWidth")
    assert opened("() => document.documentElement.scrollWidth") <= width
    assert opened(CUT) == []
    assert_accessible(opened)
