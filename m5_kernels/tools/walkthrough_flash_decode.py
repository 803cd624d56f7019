"""M5's second walkthrough: how Flash-Decoding splits KV and merges what the programs found.

python -m m5_kernels.tools.walkthrough_flash_decode          stops in pdb
python -m m5_kernels.tools.walkthrough_flash_decode --auto   docs/transcripts/m5_flash_decode.txt
"""

from __future__ import annotations

import functools
import sys

from m5_kernels.tools import flash_decode_by_hand as by_hand
from milestone_llm.lab.walkthrough.guide import read_guide
from milestone_llm.lab.walkthrough.runner import run_walkthrough

GUIDE = read_guide(
    """M5: Flash-Decoding's split and merge

Three requests decode at once, with contexts of 10, 3 and 7 tokens. A tile is two tokens and there
are four programs; a real GPU runs 528 of them with tiles of 64. Scores are small whole numbers in
log2, so that every weight is a power of two, and a value is one number instead of a vector.

The functions are those of the kernel, written with lists. Watch where the cuts fall, and that a
sequence that was cut comes out as if it had not been.

# equal shares, wherever the cuts fall
return m5_kernels/tools/flash_decode_by_hand.py::split
The tiles of all sequences are laid end to end: 5, 2 and 4. Eleven tiles among four programs are 2
or 3 each. A program per sequence would take as long as the longest, 5 tiles, while the one with 2
tiles idles.
p counts == [5, 2, 4]  # tiles of each sequence
p [(p.program, p.seq, p.first_tile, p.end_tile) for p in __return__]
  == [(0, 0, 0, 2), (1, 0, 2, 5), (2, 1, 0, 2), (2, 2, 0, 1), (3, 2, 1, 4)]
  # program, sequence, first tile, end
Try `p total, num_programs`, `ll` (the kernel's share_start and share_end).

# the first tile of sequence 0
return m5_kernels/tools/flash_decode_by_hand.py::add_tile
Program 0 begins. The maximum so far is minus infinity, so whatever is in the empty sums is scaled
by 2 ** -inf = 0. From now on all weights are relative to the largest score: none can overflow.
p scores, values == ([0, 1], [8.0, 2.0])  # scores in log2, and values
p rescale == 0.0  # factor of what was summed before
p weights == [0.5, 1]  # 2 ** (score - new_max)
p __return__ == (1, 1.5, 6.0)  # maximum, sum of weights, weighted sum
Try `u` (attend_piece()), then `p piece`.

# a larger score comes
return m5_kernels/tools/flash_decode_by_hand.py::add_tile, when hits == 2
The second tile holds a score of 3. What was summed under the maximum 1 is scaled by 2 ** (1 - 3):
this is the online softmax, which needs no second pass over the keys.
p scores == [3, 0]  # scores of the tile
p rescale == 0.25  # factor of what was summed before
p __return__ == (3, 1.5, 5.75)  # maximum, sum of weights, weighted sum
Try `p weights`.

# a part and its weight
return m5_kernels/tools/flash_decode_by_hand.py::attend_piece
Program 0 has seen four of ten tokens. It leaves its normalised output and one number: the log2 of
its sum of exponentials. With that number the part can be weighed against any other, and nothing
else is needed of its scores.
p __return__.output == 5.75 / 1.5  # attention over tokens 0 to 3
p round(2 ** __return__.lse, 6) == 12.0  # its sum: 2**0 + 2**1 + 2**3 + 2**0
p row_max == 3  # largest score of the part
Try `p __return__`, `p row_sum`.

# another program has the rest
return m5_kernels/tools/flash_decode_by_hand.py::attend_piece, when piece.program == 1
Program 1 reads the other six tokens at the same time. It knows nothing of program 0, not even its
maximum.
p piece.program, piece.seq == (1, 0)  # program, sequence
p round(2 ** __return__.lse, 6) == 6.0  # sum of its exponentials
p __return__.output == 5.0  # attention over tokens 4 to 9
Try `p scores[4:], values[4:]`.

# a whole sequence in one share
return m5_kernels/tools/flash_decode_by_hand.py::attend_piece, when piece.seq == 1
Sequence 1 lies inside the share of program 2. In the kernel such a result goes straight to the
output, with no part and no merge. With many short sequences this is the rule.
p (piece.first_tile, piece.end_tile) == (0, 2)  # tiles, of 2
p __return__.output == 3.0  # attention of sequence 1
Try `p scores, values` (the last tile is half full).

# the merge
return m5_kernels/tools/flash_decode_by_hand.py::merge
The last program of a sequence to arrive merges its parts, always in program order, so that the
result does not depend on who was last. Weights are the parts' sums, again relative to the largest.
p [round(2 ** part.lse, 6) for part in partials] == [12.0, 6.0]  # sums of the parts
p [round(w, 6) for w in weights] == [1.0, 0.5]  # their weights
p round(__return__, 6) == 4.222222  # attention of sequence 0
Try `p partials`, `u`.

# as if nothing had been cut
return m5_kernels/tools/flash_decode_by_hand.py::flash_decode
The outputs are those of a softmax over all tokens at once, for any number of programs. The sum is
taken in another order, so the last bits may differ with the batch: cuts depend on all lengths.
p [round(x, 6) for x in __return__] == [4.222222, 3.0, 3.0]  # split and merged
p [round(softmax_attention(s, v), 6) for s, v in zip(scores, values)]
  == [4.222222, 3.0, 3.0]  # all at once
Try `p [round(x, 6) for x in flash_decode(scores, values, 2, 1)]` (one program).
"""
)
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


STOPS = GUIDE.stops
main = functools.partial(run_walkthrough, GUIDE, scenario)

if __name__ == "__main__":
    sys.exit(main())
