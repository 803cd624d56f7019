"""The engine of m3_find_the_bug.py. The bug is in here: read it when you have found it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from unittest import mock

from m3_paged import LLMEngine, SamplingParams
from m3_paged.block_manager import BlockManager
from milestone_llm.lab.trace.explore import Run, write_page

PATH = Path("runs/find_the_bug.jsonl")

REQUESTS = [
    # step in which it comes, prompt tokens, max_tokens, completions
    (0, 10, 9, 1),
    (1, 6, 7, 2),
    (4, 11, 8, 2),
    (6, 5, 6, 1),
]


def serve(*, is_changed: bool, trace: str) -> tuple[LLMEngine, dict[str, list[list[int]]]]:
    """Serve the four requests; the engine, and the tokens of each request's completions."""
    engine = LLMEngine(
        "tiny-llama", max_model_len=32, block_size=4, kv_cache_tokens=128, device="cpu",
        dtype="float32", trace=trace, check_invariants=True,
    )  # fmt: skip
    if is_changed:
        kv = engine.scheduler.kv
        kv._shared_indices = functools.partial(_shared_indices, kv)
    tokens, step, waiting = {}, 0, list(enumerate(REQUESTS))
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1][0] == step:
            number, (_, num_prompt_tokens, max_tokens, n) = waiting.pop(0)
            prompt = [10 + 40 * number + place for place in range(num_prompt_tokens)]
            params = SamplingParams(
                temperature=1, seed=number, max_tokens=max_tokens, n=n, ignore_eos=True
            )
            engine.add_request(prompt, params)
        for output in engine.step():
            tokens[output.request_id] = [each.token_ids for each in output.outputs]
        step += 1
    return engine, tokens


def _shared_indices(kv: BlockManager, table: list[int], start: int, end: int) -> list[int]:
    # The change: BlockManager begins at `start // block_size`, the block of the first new token.
    # With `end` it is the block after it when that token fills its block: no copy is made then.
    touched = range(end // kv.block_size, min(kv.num_blocks_for(end), len(table)))
    return [index for index in touched if kv.pool.ref_counts[table[index]] > 1]


def main() -> None:
    """Serve with the changed engine and with M3, compare, and leave a trace and a page."""
    with mock.patch.dict(os.environ, {"LLM_TRACE": "0"}):  # only the steps of the other are wanted
        _, right = serve(is_changed=False, trace="memory")
    engine, tokens = serve(is_changed=True, trace=str(PATH))
    for request_id, completions in sorted(tokens.items()):
        for index, own in enumerate(completions):
            name = f"{request_id}/{index}" if index else request_id
            wrong = [i for i, token in enumerate(own) if token != right[request_id][index][i]]
            text = f"output token {wrong[0]} is the first wrong one" if wrong else "as it should be"
            print(f"{name:6} {text}")
    page = write_page([Run.of("an engine with a bug", engine)], PATH.with_suffix(".html"))
    print(f"wrote {PATH} and {page}")
