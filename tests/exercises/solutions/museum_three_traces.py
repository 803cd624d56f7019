"""What the traces show.

A, step 8: bob2 finds blocks 2, 3 and 5. Block 5 was taken for bob's positions 8 to 11, and bob's
last row computed position 10: slot 3 of it was never written. ann2 is the decoy. ann also ended
with tokens that nobody computed, but not at the end of a block.

B, step 2: bob's prompt has 13 tokens. The row computes positions 0 to 10, so tokens 11 and 12 are
known already: there is nothing to sample. Step 3 goes to position 13, one beyond the prompt.

C, step 8: eve finds blocks 0 and 1, which cat took in steps 4 and 5 (`evict` says that they have
lost their content). dan, in step 6, finds blocks 3 and 4, where bob was the last to write.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    step: int
    request: str
    cause: str


def findings() -> dict[str, Finding]:
    return {
        "A": Finding(8, "bob2", "b"),
        "B": Finding(2, "bob", "e"),
        "C": Finding(8, "eve", "a"),
    }
