"""An answer that has to be one of some choices is none of them. Alone, it always is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from m5_kernels.token_bitmask import TokenBitmask
from milestone_llm.core.sampling_params import SamplingParams

from .exhibit import Arrival, Exhibit, greedy
from .invariants import rules_are_kept

VOCAB_SIZE = 199
COLOURS = ((20, 21, 22), (30, 31, 32))
ANIMALS = ((60, 61, 62), (60, 71, 72))


class Choice:
    """A grammar written by hand: the output is one of some lists of tokens. After its end all may
    follow."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.choices = choices
        self.num_allowed = VOCAB_SIZE

    def bits(self, output_token_ids: Sequence[int], num_known: int | None = None) -> torch.Tensor:
        """Return the bitmask of the tokens that may follow."""
        end, output = len(output_token_ids), tuple(output_token_ids)
        beginnings = [each for each in self.choices if tuple(each[:end]) == output]
        allowed = {each[end] for each in beginnings if len(each) > end}
        self.num_allowed = len(allowed) or VOCAB_SIZE
        words = torch.full(((VOCAB_SIZE + 31) // 32,), 0 if allowed else -1)
        for token in allowed:
            words[token // 32] |= 1 << token % 32
        return words.int()


class Choices:
    """Replaces `Grammars`: it needs no library, and no tokenizer with an EOS."""

    def __init__(self, *given: object, **more: object) -> None:
        """Ignore the model: these grammars need nothing of it."""

    def rule_of(self, params: SamplingParams) -> Choice | None:
        """Return the grammar of a request."""
        return params.structured_outputs and Choice(params.structured_outputs)

    def spellings_of(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Return none: no request here has words that it must not say."""
        return []


original = TokenBitmask.send


def send(self: TokenBitmask, bits: Mapping[int, torch.Tensor]) -> None:
    """Set the masks of a step, the first one first."""
    original(self, dict(enumerate(bits.values())))


EXHIBIT = Exhibit(
    milestone="m5_kernels",
    place="m5_kernels.token_bitmask.TokenBitmask.send",
    broken=send,
    both={"m5_kernels.engine.Grammars": Choices},
    traffic=[
        Arrival(0, "colour", [23, 42, 17], greedy(3, structured_outputs=COLOURS)),
        Arrival(1, "free", [7, 77, 107], greedy(4)),
        Arrival(1, "animal", [5, 6, 8], greedy(3, structured_outputs=ANIMALS)),
    ],
    invariant=rules_are_kept,
    setting="A rule is a list of choices here: colour has to say 20 21 22 or 30 31 32, and animal "
    "60 61 62 or 60 71 72.",
    text="""
question: colour is right from beginning to end. animal and free come together, and both are
  wrong. How many tokens were allowed to animal, and which of the two has sampled from so few?
cause: The masks of a step are sent one after the other, to rows 0, 1, 2. That is right as long as
  those with a rule are the first of the batch. free comes between colour and animal: it gets
  animal's mask, and animal gets none.
invariant: A token is one of those that the rule of its request allows. What a request without a
  rule gets does not depend on the rules of others.
fix: A mask goes to the row of its request. It comes with the number of that row.
test: tests/m5/test_sampler.py::test_a_mask_goes_to_the_row_of_its_request
seen: A batch without rules kept no places for them. When a request with a rule joined, its mask
  came first in the list, and was applied to the first row.
threads: Blaizzy/mlx-vlm#1574 (closed), Blaizzy/mlx-vlm#1583 (merged)
""",
    walk="""
call exercises/museum/another_rows_rule.py::send, when len(bits) == 2
Two of three rows have a rule.
p list(bits)  # the rows that the masks are for
p list(range(len(bits)))  # the rows that they are sent to
Try `r`, then `self.words[:3, 0]`: whose mask allows every token (-1)?
""",
)
