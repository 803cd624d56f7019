"""The first page of the book: the same second of six requests on M1, M2, M3 and M4

  python -m docs.scene     records the model's words anew, in book/words.json (`make pages`)

Only the words are recorded. Who runs when, in which block, the milestones' schedulers plan: when
the book is made, and in the reader's browser after each change.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from exercises.museum.rooms import NAMES, SYMPTOMS
from milestone_llm.cli import ended_in_one_line
from milestone_llm.consoles import console
from milestone_llm.lab.explorer.page import packed, script_of
from milestone_llm.lab.playground.browser.pack import asking
from milestone_llm.lab.playground.service import Playground
from milestone_llm.lab.playground.setting import VOCAB_SIZE

ASSETS = Path(__file__).parent / "book"
WORDS = ASSETS / "words.json"
SCRIPTS = ("words", "dom", "run", "reader", "timeline")

STORY = (
    "A small island has a lighthouse. Its keeper, Anna, is old and goes to bed early. Her dog, "
    "Rufus, is young. At night he barks when a ship comes too near, and Anna gets up and rings "
    "the bell."
)
FIRST = {
    "Why is the sky blue?": 0.0,
    "What is the capital of France?": 0.0,
    "Write a haiku about the sea.": 0.0,
    f"{STORY} What is the name of the dog?": 0.4,
    f"{STORY} Continue the story.": 0.9,
    "Tell me a joke.": 1.6,
}
"""Prompts, and when they come, in seconds. Other prompts are offered instead of them."""
OTHERS = [f"{STORY} Write a title for this story.", "What is a cat?", "What do bees make?"]
MAX_TOKENS = 40
SECOND = 2.4
"""Where chapters' links lead to: r1 has ended, and all requests have come."""

POOL = {"max_model_len": 128, "max_num_batched_tokens": 128}
BATCH = POOL | {"max_num_batched_tokens": 384}  # three padded prompts
PAGED = POOL | {"max_num_seqs": 6, "kv_cache_tokens": 384}
SIDES = [
    {
        "engine": "m1_single",
        "fields": BATCH | {"max_num_seqs": 3},
        "name": "static batch",
        "told": "Three requests are one batch until the longest has ended. Rows of those that "
        "ended are computed on as padding (hatched), and all others wait.",
        "chapter": "m1_single.html",
        "course": "m2",
    },
    {
        "engine": "m2_batching",
        "fields": POOL | {"max_num_seqs": 3},
        "name": "continuous",
        "told": "Who runs is decided at every step: a row that is free goes to the next request at "
        "once. But each of three regions is kept for the longest request there may be.",
        "chapter": "m2_batching.html",
        "course": "m2",
    },
    {
        "engine": "m3_paged",
        "fields": PAGED,
        "name": "paged",
        "told": "The same memory in 24 blocks of 16 tokens. A request takes one when it needs it, "
        "so more of them run, and a block table says where its tokens are.",
        "chapter": "m3_paged.html",
        "course": "m3",
    },
    {
        "engine": "m4_prefix_chunked",
        "fields": PAGED | {"max_num_batched_tokens": 64},
        "name": "prefix, chunks",
        "told": "Equal beginnings are computed once: a block with a ring is in several tables. "
        "Long prompts come in chunks of a step's 64 tokens, beside the others' words.",
        "chapter": "m4_prefix_chunked.html",
        "course": "m4",
    },
]
"""The engines of the page: all have memory for 384 tokens."""
EXHIBITS = (
    *("free_blocks_fall", "block_too_late", "anothers_words"),
    *("second_turn", "crafted_prompt", "shared_unwritten"),
)


def record() -> list[dict[str, Any]]:
    """Return each prompt with its token ids and texts, and the texts of the model's answer."""
    from m2_batching import LLMEngine
    from milestone_llm.core.sampling_params import SamplingParams
    from milestone_llm.lab.bench.workloads import WorkItem, serve
    from milestone_llm.models.checkpoint import DEFAULT_MODEL, load_model
    from milestone_llm.trace.text import token_text

    loaded = load_model(DEFAULT_MODEL, dtype="float32", device="cpu")
    engine = LLMEngine(loaded.model, tokenizer=loaded.tokenizer, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    prompts = [*FIRST, *OTHERS]
    outputs = serve(engine, [WorkItem(prompt, params) for prompt in prompts], chat=True)

    def texts(token_ids: Sequence[int]) -> list[str]:
        return [token_text(engine.tokenizer.decode, token) for token in token_ids]

    return [
        {
            "prompt": prompt,
            "ids": list(output.prompt_token_ids),
            "texts": texts(output.prompt_token_ids),
            "answer": texts(output.outputs[0].token_ids),
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def recorded() -> list[dict[str, Any]]:
    """Return what `record` has written."""
    words: list[dict[str, Any]] = json.loads(WORDS.read_text(encoding="utf-8"))
    return words


def setting(side: dict[str, Any]) -> dict[str, Any]:
    """Return the playground's setting of the first requests on one engine."""
    requests = [
        {
            "arrival": arrival,
            "prompt": len(own["ids"]),
            "output": len(own["answer"]),
            "tokens": [token % VOCAB_SIZE for token in own["ids"]],
        }
        for own, arrival in zip(recorded(), FIRST.values(), strict=False)
    ]
    return {"requests": requests, "sides": [{name: side[name] for name in ("engine", "fields")}]}


@cache
def runs() -> list[str]:
    """Return the run of the first requests on each engine, as the page unpacks it."""
    return [packed(Playground().run(setting(side))) for side in SIDES]


def chinese() -> dict[str, str]:
    """Return the Chinese of what the page says in English, in addition to the replays' table."""
    table: dict[str, str] = json.loads((ASSETS / "scene_chinese.json").read_text(encoding="utf-8"))
    return table


def body(links: dict[str, str], has_playground: bool, chapters: str = "docs") -> str:
    """Return the page's content. Its script translates it if the page is Chinese.

    Args:
        links: addresses by the words that are shown; those of `chapter` and `course` change with
            the engine.
        has_playground: whether Python for the reader's browser is in the book.
        chapters: the folder of the chapters in the reader's language.
    """
    data = {
        "sides": [side | {"chapter": f"{chapters}/{side['chapter']}"} for side in SIDES],
        "second": SECOND,
        "words": recorded(),
        "arrivals": list(FIRST.values()),
        "runs": runs(),
        "vocabulary": VOCAB_SIZE,
        "exhibits": {name: [NAMES.index(name) + 1, SYMPTOMS[name]] for name in EXHIBITS},
        "links": links,
        "hasPlayground": has_playground,
    }
    stops = "".join(
        f'<button data-stop="{number}" tabindex="-1"><b>M{number}</b> {side["name"]}</button>'
        for number, side in enumerate(SIDES, 1)
    )
    parts = {
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "stops": stops,
        "links": "".join(
            f'<a href="{html.escape(address)}" data-link="{name}">{name}</a>'
            for name, address in links.items()
        ),
    }
    page = (ASSETS / "scene.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def script() -> str:
    """Return the page's script, which shares no name with the book's."""
    own = (ASSETS / "scene.js").read_text(encoding="utf-8")
    return f"(() => {{\n{script_of(SCRIPTS, asking(), chinese())}\n{own}}})();\n"


def main() -> int:
    """Record the words anew. Returns the exit status."""

    def write() -> None:
        lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in record())
        WORDS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        console.print(f"wrote {WORDS}", soft_wrap=True)

    return ended_in_one_line(write)


if __name__ == "__main__":
    sys.exit(main())
