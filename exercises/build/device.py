"""Requests of scripted traffic, and a model runner whose KV memory is lists: no model, no waiting.

Each place of the memory stores which tokens its keys and values were computed from: the token and
all tokens before it. Every row writes its tokens and then reads its whole context back through its
blocks. So memory that is given to two requests, or a wrong block of a prefix, is found in the very
step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.trace.text import plural

from .check import Wrong

VOCAB_SIZE = 1000


def token_of(*words: object) -> int:
    """Return a token id that depends on these words only."""
    return zlib.crc32(repr(words).encode()) % VOCAB_SIZE


@dataclass(frozen=True)
class Ask:
    """A request to come."""

    name: str
    num_prompt_tokens: int = 4
    """Prompt tokens of the request's own; they come after the blocks of `prompt`."""
    max_tokens: int = 3
    priority: int = 0
    n: int = 1
    prompt: str = ""
    """Named blocks that the prompt begins with: "AB" is block A, then block B."""
    salt: str = ""

    def __str__(self) -> str:
        own = plural(self.num_prompt_tokens, "token") + (" of its own" if self.prompt else "")
        blocks = f"blocks {' '.join(self.prompt)} and " if self.prompt else ""
        more = f", priority {self.priority}" if self.priority else ""
        more += f", n={self.n}" if self.n > 1 else ""
        more += f", cache_salt={self.salt!r}" if self.salt else ""
        return f"{self.name} (prompt of {blocks}{own}, {self.max_tokens} to generate{more})"

    def requests(self, arrival: int, block_size: int) -> list[Request]:
        """Return a request for each completion, as an engine makes them."""
        tokens = [token_of(name, index) for name in self.prompt for index in range(block_size)]
        tokens += [token_of(self.name, "own", index) for index in range(self.num_prompt_tokens)]
        params = SamplingParams(
            max_tokens=self.max_tokens, n=self.n, ignore_eos=True, cache_salt=self.salt
        )
        return [
            Request(
                f"{self.name}/{index}" if index else self.name,
                tokens,
                params,
                arrival=arrival,
                priority=self.priority,
                seed=index,
                index=index,
            )
            for index in range(self.n)
        ]


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """Return the token that `ListDevice` samples after these tokens."""
    return token_of(seed, *token_ids)


class ListDevice:
    """Carries plans out on KV memory of lists."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[int, list[int]] = {}
        """Per block, for each of its places: a number made of a token and all tokens before it."""
        self.host: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> dict[str, list[SampledToken]]:
        """Move blocks, write, read, sample.

        Raises:
            Wrong: a row has no place for a token, or does not find its own context.
        """
        for source, target in plan.swap_outs:
            self.host[target] = list(self._block(source))
        for source, target in plan.swap_ins:
            self.memory[target] = list(self.host[source])
        copied = [list(self._block(source)) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, copied, strict=True):
            self.memory[target] = content
        for row in plan.rows:
            self._write(row)
        for row in plan.rows:
            self._read(row)
        return {
            request.request_id: [SampledToken(next_token(request.token_ids, request.seed))]
            for row in plan.rows
            for request in row.sampling_requests
        }

    def _block(self, block: int) -> list[int]:
        return self.memory.setdefault(block, [0] * self.block_size)

    def _write(self, row: ScheduledRequest) -> None:
        for position in range(row.start, row.end):
            index, offset = divmod(position, self.block_size)
            if index >= len(row.blocks):
                raise Wrong(
                    f"{row.request.request_id}'s row writes token {position}, but its blocks "
                    f"{row.blocks} have room for {len(row.blocks) * self.block_size} tokens."
                )
            self._block(row.blocks[index])[offset] = _mark(row.request, position)

    def _read(self, row: ScheduledRequest) -> None:
        for position in range(row.end):
            index, offset = divmod(position, self.block_size)
            if self._block(row.blocks[index])[offset] != _mark(row.request, position):
                raise Wrong(
                    f"{row.request.request_id} does not find its own keys and values: at token "
                    f"{position}, in block {row.blocks[index]} (the blocks of the row are "
                    f"{row.blocks}), are none, or those of other tokens, or of the same token "
                    f"after another beginning."
                )


def _mark(request: Request, position: int) -> int:
    """Return a number in place of a token's keys and values, which depend on all tokens before."""
    return 1 + zlib.crc32(repr(request.token_ids[: position + 1]).encode())
