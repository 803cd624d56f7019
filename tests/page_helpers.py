"""What tests of pages share: a page in Chromium, and all that goes wrong on it."""

from __future__ import annotations

from typing import Any

WIDE = {"width": 1440, "height": 900}
PATIENCE_MS = 180_000


class Opened:
    """A page and all that went wrong on it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": WIDE, **options})
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
