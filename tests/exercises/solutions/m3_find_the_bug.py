"""What the trace shows.

Step 2: r1 and r1/1 share block 4, which holds two of its four tokens. Both write their token of
position 6. r1 comes first and gets a copy, block 5 (`copy_on_write`). So it should be.

Step 5: r2 and r2/1 share block 11, which holds three of its four tokens. Both write their token of
position 11 into the last slot of it, and there is no `copy_on_write`. Their tokens differ, so one
of them reads the other's keys and values from then on. From step 6 on each has a block of its own
behind it, and nothing looks strange any more.

What is special: that token fills its block. The changed code looks for shared blocks from the block
of the position after the token, not from that of the token itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    step: int
    requests: set[str]
    block: int
    position: int
    cause: str


def finding() -> Finding:
    return Finding(step=5, requests={"r2", "r2/1"}, block=11, position=11, cause="a")
