"""M1's walkthrough, a session in pdb with a guide: `python -m m1_single.walkthrough`

`--auto` prints docs/transcripts/m1_walkthrough.txt. The stops are in guide.txt.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import m1_single
from milestone_llm.lab.bench.workloads import exactly
from milestone_llm.lab.walkthrough.runner import run_walkthrough

GUIDE = Path(__file__).with_name("guide.txt").read_text(encoding="utf-8")


def scenario() -> None:
    """Three requests on an engine that computes two at a time."""
    engine = m1_single.LLMEngine(
        "tiny-llama",
        max_num_seqs=2,
        max_model_len=64,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    prompts = [[11, 12, 13], [21, 22, 23, 24, 25], [31, 32, 33, 34]]
    engine.generate(prompts, [exactly(2), exactly(5), exactly(2)])


main = functools.partial(run_walkthrough, GUIDE, scenario)

if __name__ == "__main__":
    sys.exit(main())
