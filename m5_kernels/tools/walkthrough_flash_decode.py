"""M5's second walkthrough: how Flash-Decoding splits KV and merges what the programs found.

    python -m m5_kernels.walkthrough_flash_decode          stops in pdb
    python -m m5_kernels.walkthrough_flash_decode --auto   docs/transcripts/m5_flash_decode.txt

Three sequences of 10, 3 and 7 tokens, tiles of two tokens, four programs, one head of one number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from milestone_llm.walkthrough.runner import Look, Stop, run_walkthrough

from . import flash_decode_by_hand as by_hand

TITLE = "M5: Flash-Decoding's split and merge"
INTRO = """
Three requests decode at once, with contexts of 10, 3 and 7 tokens. A tile is two tokens and there
are four programs; a real GPU runs 528 of them with tiles of 64. Scores are small whole numbers in
log2, so that every weight is a power of two, and a value is one number instead of a vector.

The functions are those of the kernel, written with lists. Watch where the cuts fall, and that a
sequence that was cut comes out as if it had not been.
"""

STOPS = [
    Stop(
        "equal shares, wherever the cuts fall",
        by_hand.split,
        "The tiles of all sequences are laid end to end: 5, 2 and 4. Eleven tiles among four "
        "programs are 2 or 3 each. A program per sequence would take as long as the longest, 5 "
        "tiles, while the one with 2 tiles idles.",
        [
            Look("counts", "tiles of each sequence", [5, 2, 4]),
            Look(
                "[(p.program, p.seq, p.first_tile, p.end_tile) for p in __return__]",
                "program, sequence, first tile, end",
                [(0, 0, 0, 2), (1, 0, 2, 5), (2, 1, 0, 2), (2, 2, 0, 1), (3, 2, 1, 4)],
            ),
        ],
        at="return",
        commands=["p total, num_programs", "ll  the kernel's share_start and share_end"],
    ),
    Stop(
        "the first tile of sequence 0",
        by_hand.add_tile,
        "Program 0 begins. The maximum so far is minus infinity, so whatever is in the empty sums "
        "is scaled by 2 ** -inf = 0. From now on all weights are relative to the largest score: "
        "none can overflow.",
        [
            Look("scores, values", "scores in log2, and values", ([0, 1], [8.0, 2.0])),
            Look("rescale", "factor of what was summed before", 0.0),
            Look("weights", "2 ** (score - new_max)", [0.5, 1]),
            Look("__return__", "maximum, sum of weights, weighted sum", (1, 1.5, 6.0)),
        ],
        at="return",
        commands=["u  attend_piece()", "p piece"],
    ),
    Stop(
        "a larger score comes",
        by_hand.add_tile,
        "The second tile holds a score of 3. What was summed under the maximum 1 is scaled by 2 ** "
        "(1 - 3): this is the online softmax, which needs no second pass over the keys.",
        [
            Look("scores", "scores of the tile", [3, 0]),
            Look("rescale", "factor of what was summed before", 0.25),
            Look("__return__", "maximum, sum of weights, weighted sum", (3, 1.5, 5.75)),
        ],
        at="return",
        when="hits == 2",
        commands=["p weights"],
    ),
    Stop(
        "a part and its weight",
        by_hand.attend_piece,
        "Program 0 has seen four of ten tokens. It leaves its normalised output and one number: "
        "the log2 of its sum of exponentials. With that number the part can be weighed against "
        "any other, and nothing else is needed of its scores.",
        [
            Look("__return__.output", "attention over tokens 0 to 3", 5.75 / 1.5),
            Look("round(2 ** __return__.lse, 6)", "its sum: 2**0 + 2**1 + 2**3 + 2**0", 12.0),
            Look("row_max", "largest score of the part", 3),
        ],
        at="return",
        commands=["p __return__", "p row_sum"],
    ),
    Stop(
        "another program has the rest",
        by_hand.attend_piece,
        "Program 1 reads the other six tokens at the same time. It knows nothing of program 0, "
        "not even its maximum.",
        [
            Look("piece.program, piece.seq", "program, sequence", (1, 0)),
            Look("round(2 ** __return__.lse, 6)", "sum of its exponentials", 6.0),
            Look("__return__.output", "attention over tokens 4 to 9", 5.0),
        ],
        at="return",
        when="piece.program == 1",
        commands=["p scores[4:], values[4:]"],
    ),
    Stop(
        "a whole sequence in one share",
        by_hand.attend_piece,
        "Sequence 1 lies inside the share of program 2. In the kernel such a result goes straight "
        "to the output, with no part and no merge. With many short sequences this is the rule.",
        [
            Look("(piece.first_tile, piece.end_tile)", "tiles, of 2", (0, 2)),
            Look("__return__.output", "attention of sequence 1", 3.0),
        ],
        at="return",
        when="piece.seq == 1",
        commands=["p scores, values  the last tile is half full"],
    ),
    Stop(
        "the merge",
        by_hand.merge,
        "The last program of a sequence to arrive merges its parts, always in program order, so "
        "that the result does not depend on who was last. Weights are the parts' sums, again "
        "relative to the largest.",
        [
            Look(
                "[round(2 ** part.lse, 6) for part in partials]", "sums of the parts", [12.0, 6.0]
            ),
            Look("[round(w, 6) for w in weights]", "their weights", [1.0, 0.5]),
            Look("round(__return__, 6)", "attention of sequence 0", 4.222222),
        ],
        at="return",
        commands=["p partials", "u"],
    ),
    Stop(
        "as if nothing had been cut",
        by_hand.flash_decode,
        "The outputs are those of a softmax over all tokens at once, for any number of programs. "
        "The sum is taken in another order, so the last bits may differ with the batch: cuts "
        "depend on all lengths.",
        [
            Look("[round(x, 6) for x in __return__]", "split and merged", [4.222222, 3.0, 3.0]),
            Look(
                "[round(softmax_attention(s, v), 6) for s, v in zip(scores, values)]",
                "all at once",
                [4.222222, 3.0, 3.0],
            ),
        ],
        at="return",
        commands=["p [round(x, 6) for x in flash_decode(scores, values, 2, 1)]  one program"],
    ),
]
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
    """One launch, three sequences, four programs."""
    by_hand.flash_decode(SCORES, VALUES, tile=2, num_programs=4)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the walkthrough; returns the exit code."""
    return run_walkthrough(TITLE, INTRO, STOPS, scenario, argv)


if __name__ == "__main__":
    sys.exit(main())
