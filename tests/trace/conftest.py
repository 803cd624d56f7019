"""A Chromium for the tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")  # no longer: its event loop runs, and others could not have theirs
def browser() -> Iterator[Any]:
    """Headless Chromium. Without it these tests are skipped, and say what to install."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests want `pip install playwright`"
    )
    if CHROMIUM is None:
        pytest.skip("the page's tests want Chromium: `apt-get install chromium`")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()
