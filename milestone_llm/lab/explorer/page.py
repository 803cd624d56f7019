"""The page that replays a run: one file that works from disk, without a network.

It has a timeline with a cursor, and at the cursor prompts with the words so far, the batch, the
token budget, the queues with why a request waits, and the owners of every KV block. It also asks
what the next step will be. Two runs are shown next to each other with one clock.

In a frame of another page, with `#embed` at the end of the address, it has only the timelines and
the words. It takes that page's theme, and tells it how high it is: `embed` in main.js.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from milestone_llm.core.errors import InputError
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import request_color, token_text

from .live import PageLines

SCRIPTS = (
    "words",
    "dom",
    "run",
    "reader",
    "timeline",
    "memory",
    "panels",
    "device",
    "guess",
    "main",
)
MAX_TRACES = 2
NO_TEXTS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Run:
    """A trace, and facts that are not in it."""

    label: str
    records: Sequence[StepRecord]
    max_num_batched_tokens: int | None = None
    """Most tokens of a step; None: the page finds it in the reasons to wait, or does without."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Texts of sampled tokens, by token id."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts of prompts, by request id."""
    look_at: int | None = None
    """A step to begin at; the timeline marks it."""

    @property
    def title(self) -> str:
        """Its label, and the milestone if that differs."""
        milestone = self.records[0].milestone
        return self.label if self.label == milestone else f"{self.label} ({milestone})"

    @classmethod
    def of(
        cls,
        label: str,
        engine: Any,
        look_at: int | None = None,
        prompts: Mapping[str, str] = NO_TEXTS,
    ) -> Run:
        """Return the run that the tracer of an engine has recorded."""
        records: list[StepRecord] = list(engine.tracer.records)
        rows = [row for record in records for row in record.batch]
        tokens = {row.sampled_token for row in rows if row.sampled_token is not None}
        decode = engine.tokenizer and engine.tokenizer.decode
        texts = {token: token_text(decode, token) for token in tokens} if decode else {}
        budget = engine.config.max_num_batched_tokens
        return cls(label, records, budget, texts, prompts, look_at)


@dataclass(frozen=True)
class LiveSource:
    """A server with a live page."""

    url: str
    """Path on that server that answers with records as they happen, from `LiveTrace.subscribe`."""
    model: str = ""
    """Model name for requests that the page sends."""
    budget: int = 0
    """Most tokens of a step; 0: the page finds it in the reasons to wait."""


@dataclass(frozen=True)
class PagePart:
    """A part of a page above its runs, which asks the server for them: the playground."""

    title: str
    html: str
    script: str
    """Defines `runPart()`, which the page calls at its start."""
    style: str
    policy: Mapping[str, str] = field(default_factory=dict)
    """What the page's content security policy allows in addition."""


def explorer_html(
    runs: Sequence[Run] = (), *, live: LiveSource | None = None, part: PagePart | None = None
) -> str:
    """Return the page as one HTML text.

    Args:
        runs: one recorded run, or two to be compared; none for a live page.
        live: the server that sends records. If it answers 401 or 403, the page asks the user for a
            key and sends it as `Authorization: Bearer KEY`.
        part: gets the runs from its server.

    Raises:
        ValueError: more than two runs, a run without steps, or no runs and no server.
    """
    is_filled = runs or live or part
    if len(runs) > MAX_TRACES or not is_filled or not all(run.records for run in runs):
        raise ValueError(f"the page shows 1 to {MAX_TRACES} runs of some steps, or a live URL")
    data = [f'<script type="text/x-trace">{_packed(run)}</script>' for run in runs]
    if live is not None:
        attributes = (f'data-{name}="{html.escape(str(own))}"' for name, own in vars(live).items())
        data.append(f'<div id="live-source" {" ".join(attributes)} hidden></div>')
    names = [run.title for run in runs] or [f"Live: {(live and live.model) or 'this server'}"]
    names = [part.title] if part else names
    title = html.escape(" beside ".join(names))
    return _page(title, data, part, asks_a_server=bool(live or part))


def in_the_page_of_today(path: Path) -> str:
    """Return a new page with the runs of an older one.

    Raises:
        InputError: the old page cannot be read, or has no runs.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    title = re.search(r"<title>(.*?)</title>", page)
    data = re.findall(r'<script type="text/x-trace">.*?</script>', page)
    if not title or not data:
        raise InputError(f"{path} replays no run")
    return _page(title[1], data)


def _page(
    title: str, data: Iterable[str], part: PagePart | None = None, *, asks_a_server: bool = False
) -> str:
    script = script_of(SCRIPTS, part.script if part else "")
    style = _asset("style.css") + (part.style if part else "")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if asks_a_server else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",  # and no code makes trusted types
        "trusted-types": "'none'",
    }
    for name, allowed in (part.policy if part else {}).items():
        policy[name] = f"{policy.get(name, '')} {allowed}".replace("'none'", "").strip()
    parts = {
        "title": title,
        "policy": "; ".join(map(" ".join, policy.items())),
        "style": style,
        "part": part.html if part else "",
        "data": "\n".join(data),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def script_of(names: Iterable[str], before: str = "", chinese: Mapping[str, str] = NO_TEXTS) -> str:
    """Return scripts of the page as one, with another one before them.

    Args:
        names: of the scripts.
        before: the other one.
        chinese: the Chinese of what it says, in addition to `chinese_words`.
    """
    colors = json.dumps([request_color(index) for index in range(24)])
    first = f'"use strict";\nconst REQUEST_COLORS = {colors};'
    words = {**chinese_words(), **chinese}
    first += f"\nconst CHINESE = {json.dumps(words, ensure_ascii=False)};"
    return "\n".join(
        [first, *([before] if before else []), *(_asset(f"{name}.js") for name in names)]
    )


def write_page(runs: Sequence[Run], path: Path) -> Path:
    """Write the page of recorded runs. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(explorer_html(runs), encoding="utf-8")
    return path


def _packed(run: Run) -> str:
    """Return base64 of gzip of lines, which `readRun` in reader.js unpacks."""
    meta = {
        "label": run.label,
        "budget": run.max_num_batched_tokens,
        "texts": dict(run.texts),
        "prompts": {name: shortened(text) for name, text in run.prompts.items()},
        "look_at": run.look_at,
    }
    page = PageLines()
    return packed("\n".join([json.dumps(meta), *(page.line(record) for record in run.records)]))


def packed(text: str) -> str:
    """Return base64 of gzip, as `readRun` in reader.js unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def shortened(prompt: str) -> str:
    """Return a prompt in one line. Of a long one, the beginning and the end: prompts with a common
    beginning differ there."""
    text = " ".join(prompt.split())
    if len(text) <= 160:
        return text
    return f"{text[:60].rpartition(' ')[0]} … {text[-96:].partition(' ')[2]}"


def chinese_words() -> dict[str, str]:
    """Return the Chinese of what the pages say in English. words.js says how it is used."""
    table: dict[str, str] = json.loads(_asset("chinese.json"))
    return table


def _hash(text: str) -> str:
    """Return the source with which a content security policy allows only this inline script or
    style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
