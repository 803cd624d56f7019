"""M4's walkthrough, a session in pdb with a guide: `python -m m4_prefix_chunked.walkthrough`

`--auto` prints docs/transcripts/m4_walkthrough.txt. The stops are in guide.txt.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import m4_prefix_chunked
from milestone_llm.lab.bench.workloads import exactly
from milestone_llm.lab.walkthrough.runner import run_walkthrough
from milestone_llm.models.tiny_models import build_tiny_model

GUIDE = Path(__file__).with_name("guide.txt").read_text(encoding="utf-8")


SYSTEM_PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
QUESTION = [*SYSTEM_PROMPT, 21, 22, 23]


def scenario() -> None:
    """Five requests, each before the step that its story needs; then one that guesses."""
    engine = m4_prefix_chunked.LLMEngine(
        "tiny-llama",
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_model_len=32,
        block_size=4,
        kv_cache_tokens=40,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    (first,) = engine.generate([QUESTION], exactly(3))
    engine.add_request([*SYSTEM_PROMPT, 31, 32], exactly(3))
    engine.add_request(SYSTEM_PROMPT, exactly(4))
    for _ in range(2):
        engine.step()
    engine.add_request(list(range(41, 59)), exactly(1))
    for _ in range(2):
        engine.step()
    engine.add_request([*QUESTION, *first.token_ids, 24], exactly(2))
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()
    model = build_tiny_model("gemma3", vocab_size=12)  # of few words: its text soon repeats
    m4_prefix_chunked.LLMEngine(model, max_model_len=64, speculation="ngram").generate(
        [[1, 2, 3]], exactly(16)
    )


main = functools.partial(run_walkthrough, GUIDE, scenario)

if __name__ == "__main__":
    sys.exit(main())
