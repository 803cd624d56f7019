"""M2's walkthrough, a session in pdb with a guide: `python -m m2_batching.walkthrough`

`--auto` prints docs/transcripts/m2_walkthrough.txt. The stops are in guide.txt.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import m2_batching
from milestone_llm.lab.bench.workloads import exactly
from milestone_llm.lab.walkthrough.runner import run_walkthrough

GUIDE = Path(__file__).with_name("guide.txt").read_text(encoding="utf-8")


def scenario() -> None:
    """Three requests at the start and two after the third step."""
    engine = m2_batching.LLMEngine(
        "tiny-llama",
        max_num_seqs=2,
        max_num_batched_tokens=9,
        max_model_len=64,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    for prompt, num_tokens in (([11, 12, 13], 2), ([21, 22, 23, 24, 25], 5), ([31, 32, 33, 34], 2)):
        engine.add_request(prompt, exactly(num_tokens))
    for _ in range(3):
        engine.step()
    engine.add_request([41, 42, 43, 44, 45, 46, 47, 48, 49], exactly(2))
    engine.add_request([51, 52], exactly(1))
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()


main = functools.partial(run_walkthrough, GUIDE, scenario)

if __name__ == "__main__":
    sys.exit(main())
