"""M5's second walkthrough: how Flash-Decoding splits KV and merges the programs' results.

python -m docs.questions.walkthrough_flash_decode          stops in pdb
python -m docs.questions.walkthrough_flash_decode --auto   docs/transcripts/m5_flash_decode.txt

The stops are in walkthrough_flash_decode.txt.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from docs.questions import flash_decode_by_hand as by_hand
from milestone_llm.lab.walkthrough.runner import run_walkthrough

GUIDE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
SCORES: list[list[float]] = [
    [0, 1, 3, 0, 0, 0, 0, 0, 0, 0],
    [1, 0, 0],
    [0, 0, 1, 1, 0, 0, 1],
]
VALUES = [
    [8.0, 2.0, 4.0, 2.0, 6.0, 3.0, 5.0, 5.0, 4.0, 7.0],
    [2.0, 6.0, 2.0],
    [1.0, 5.0, 3.0, 3.0, 2.0, 4.0, 3.0],
]


def scenario() -> None:
    """Run one launch: three sequences, four programs."""
    by_hand.flash_decode(SCORES, VALUES, tile=2, num_programs=4)


main = functools.partial(run_walkthrough, GUIDE, scenario)

if __name__ == "__main__":
    sys.exit(main())
