"""The explorer page of a running server: it gets each step's record while it is open."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from milestone_llm.lab.explorer.live import LiveTrace, Subscription
from milestone_llm.lab.explorer.page import LiveSource, explorer_html

from .async_engine import AsyncEngine
from .errors import ApiError

URL = "/trace"
MAX_READERS = 8
"""Most pages that may watch at one time: each has a thread that writes JSON."""
PATIENCE_SECONDS = 0.5
"""Seconds without a step after which we check that the server still runs."""


class LivePage:
    """Sends step records to pages. The engine is traced only while there is a reader.

    Args:
        tokenizer: decodes sampled tokens for the page; nothing else may use it.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Any) -> None:
        info = engine.client.info
        source = LiveSource(URL, info.model_name, info.max_num_batched_tokens)
        self.html = explorer_html(live=source)
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', self.html)
        self.headers = {
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        """Headers of the page and of its step records: the page's own policy, and that no other
        page may put it into a frame, which only a header can say."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # a tokenizer is not thread-safe
        self._live = LiveTrace(decode=self._decode if tokenizer is not None else None)
        self._threads = ThreadPoolExecutor(MAX_READERS, "page")

    def name(self, request_id: str, prompt: str) -> None:
        """Tell pages the beginning of a request's prompt."""
        self._live.name(request_id, prompt)

    def subscribe(self) -> Subscription:
        """Add a reader.

        Raises:
            ApiError: there are `MAX_READERS` already.
        """
        if self._live.num_readers >= MAX_READERS:
            raise ApiError(429, f"{MAX_READERS} pages are watching already; close one of them")
        if self._live.num_readers == 0:
            self._engine.client.watch(self._live)
        return self._live.subscribe()

    async def lines(self, reader: Subscription) -> AsyncIterator[str]:
        """Yield the lines for a page, until it is closed or the server ends."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            while self._engine.closed_because is None:
                line = await run(self._threads, reader.get, PATIENCE_SECONDS)
                if line is not None:
                    yield line + "\n"
        finally:
            reader.close()
            if self._live.num_readers == 0:
                self._engine.client.watch(None)
                self._live.clear()

    def _decode(self, token_ids: list[int]) -> str:
        with self._lock:
            text: str = self._tokenizer.decode(token_ids)
        return text
