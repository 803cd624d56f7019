"""A runner without a model that reads every KV position back through the tables, at every step.

A real model's keys and values of a token depend on the token and on all before it. Here they are a
number: `KV(p) = hash(tokens[0 .. p])`. A row writes the numbers of its new tokens where its table
says, and then reads all of its context. If a block is given to two owners, freed too early, found
by a wrong hash, copied or swapped to a wrong place, an assertion fails in the very step. A sampled
token depends only on the tokens before it, so the right output of a request is known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

from m4_prefix_chunked.speculation import draft_token_ids
from m5_kernels.extras.spec_decode.proposer import UNKNOWN
from milestone_llm.core.kv import NULL_BLOCK, tables_of
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

Slot = tuple[object, int]


def kv_of(token_ids: Sequence[int], group: int = 0) -> list[int]:
    """Return the number that a group of layers stores for each token. It depends on it and on all
    before it."""
    kept, parent = [], group
    for token_id in token_ids:
        parent = hash((parent, token_id))  # of numbers it is the same in every process
        kept.append(parent)
    return kept


def seed_of(params: SamplingParams, index: int) -> int:
    """Return a seed that differs between completions of the same prompt."""
    return (params.seed or 0) + index


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """Return the token that follows, for a completion with this seed; EOS about once in twenty."""
    number = kv_of([*token_ids, seed])[-1]
    return EOS_TOKEN_ID if number % 20 == 0 else 3 + number % (VOCAB_SIZE - 3)


def right_output(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int, index: int = 0
) -> tuple[list[int], str]:
    """Return tokens and finish reason of a request, which do not depend on other requests."""
    token_ids = list(prompt)
    while True:
        token = next_token(token_ids, seed_of(params, index))
        token_ids.append(token)
        num_output = len(token_ids) - len(prompt)
        if token == EOS_TOKEN_ID and not params.ignore_eos and num_output > params.min_tokens:
            return token_ids[len(prompt) :], "stop"
        if num_output >= params.max_tokens or len(token_ids) >= max_model_len:
            return token_ids[len(prompt) :], "length"


def some_wrong(token_ids: Sequence[int], request: Request, num_tokens: int) -> list[int]:
    """Return the tokens that will follow, every fourth of them wrong."""
    known = list(token_ids)
    for place in range(num_tokens):
        is_wrong = (len(known) + place) % 4 == 0
        seed = seed_of(request.sampling_params, request.index)
        known.append(3 if is_wrong else next_token(known, seed))
    return known[len(token_ids) :]


class ReadBackRunner:
    """Replaces any milestone's runner, pipelined ones included."""

    def __init__(
        self, block_size: int | None = None, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        """Window of each group of layers. Each group has its own KV, in blocks of its own."""
        self.device: dict[Slot, int] = {}
        self.host: dict[Slot, int] = {}
        self.raise_at: dict[str, BaseException] = {}
        """Exceptions for the next `launch` or `wait`."""
        self._tokens: dict[str, tuple[Request, list[int]]] = {}
        self._have_guessed: set[str] = set()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Move blocks, write, read back, and choose the tokens that `wait` returns."""
        self._raise("launch")
        _move(self.device, self.host, plan.swap_outs)
        _move(self.host, self.device, plan.swap_ins)
        _move(self.device, self.device, plan.copies)
        rows = [row for row in plan.rows if not row.is_padding]
        guesses = {id(row): self._guesses(row) for row in rows}
        spans = {id(row): self._span(row) for row in rows}
        groups = range(len(self.windows))
        kept = {
            id(row): [kv_of(self._known_tokens(row.request) + guesses[id(row)], g) for g in groups]
            for row in rows
        }
        for row in rows:
            start, end = spans[id(row)]
            for group in groups:
                slots = self._slots(row, range(start, end), group)
                self.device.update(zip(slots, kept[id(row)][group][start:end], strict=True))
        sampled = {}
        for row in rows:
            start, end = spans[id(row)]
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(0, start - window + 1)
                found = [self.device.get(s) for s in self._slots(row, range(first, end), group)]
                assert found == kept[id(row)][group][first:end], (
                    f"{row.request.request_id} finds another KV at positions {first}..{end} of "
                    f"{row.start}..{row.end}, blocks {tables_of(row.blocks)}, group {group}"
                )
            for request in row.sampling_requests:
                seed = seed_of(request.sampling_params, request.index)
                known, tokens = list(self._known_tokens(request)), []
                for guess in guesses[id(row)]:
                    if guess != next_token(known, seed):
                        break
                    tokens.append(SampledToken(guess))
                    known.append(guess)
                token = next_token(known, seed)
                sampled[request.request_id] = [*tokens, SampledToken(token)]
                self._tokens[request.request_id] = (request, [*known, token])
        return LaunchedStep(lambda: self._wait(sampled))

    def run(self, plan: StepPlan) -> dict[str, list[SampledToken]]:
        """Launch and wait."""
        return self.launch(plan).wait()

    def is_right(self, block: int) -> bool:
        """Return whether every slot of a block has been written, and not been overwritten since."""
        places = range(self.block_size or 0)
        return all((block, place) in self.device for place in places)

    def _wait(self, sampled: dict[str, list[SampledToken]]) -> dict[str, list[SampledToken]]:
        self._raise("wait")
        return sampled

    def reset(self) -> None:
        """Forget all requests and all KV."""
        self._tokens.clear()
        self.device.clear()
        self.host.clear()

    def _known_tokens(self, request: Request) -> list[int]:
        """Return a request's tokens, those in flight included, as a device would know them."""
        owner, tokens = self._tokens.get(request.request_id, (None, []))
        if owner is request and len(tokens) > len(request.token_ids):
            assert tokens[: len(request.token_ids)] == request.token_ids
            return tokens
        return request.token_ids

    def _guesses(self, row: ScheduledRequest) -> list[int]:
        """Return a row's draft tokens. Those that the host leaves to the device are mostly
        right."""
        guesses = draft_token_ids(row)
        if UNKNOWN in guesses:
            guesses = some_wrong(self._known_tokens(row.request), row.request, len(guesses))
        if guesses:
            self._have_guessed.add(row.request.request_id)
        return guesses

    def _span(self, row: ScheduledRequest) -> tuple[int, int]:
        """Return the first and last+1 position of a row. It begins earlier than planned if draft
        tokens in flight have been rejected."""
        if not row.samples:
            return row.start, row.end
        end = len(self._known_tokens(row.request)) + len(draft_token_ids(row))
        assert end == row.end or (end < row.end and row.request.request_id in self._have_guessed)
        return end - row.num_new_tokens, end

    def _slots(self, row: ScheduledRequest, positions: range, group: int) -> list[Slot]:
        if self.block_size is None:  # M1 has no KV memory of its own, M2 one region a request
            owner = row.blocks[0] if row.blocks else row.request.request_id
            return [(owner, position) for position in positions]
        size, table = self.block_size, tables_of(row.blocks)[group]
        used = table[positions.start // size : -(-positions.stop // size)]
        assert NULL_BLOCK not in used, f"{row.request.request_id} uses a block that was given back"
        return [(table[position // size], position % size) for position in positions]

    def _raise(self, where: str) -> None:
        if error := self.raise_at.pop(where, None):
            raise error


def _move(source: dict[Slot, int], target: dict[Slot, int], moves: list[tuple[int, int]]) -> None:
    """Copy whole blocks; all are read before any is written."""
    found = [
        ((to_block, place[1]), kept)
        for from_block, to_block in moves
        for place, kept in source.items()
        if place[0] == from_block
    ]
    target.update(found)
