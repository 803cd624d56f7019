"""What tests of paged schedulers share: plans in a line, and a device made of lists.

`PagedDevice` is a runner whose KV memory is Python lists. It moves blocks as the plan says, writes
each row's tokens where the block table says, and then reads the whole context back through the
table. A scheduler that swaps, copies or frees a block wrongly is caught at the very step. The next
token is a hash of the context and the seed, so that what a request must give is known beforehand.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from m3_paged import EngineConfig
from m3_paged.scheduler import Scheduler
from m4_prefix_chunked.speculation import draft_token_ids
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

VOCAB_SIZE = 1000
COMPLETIONS: dict[Request, list[Request]] = {}
"""Of requests that these helpers have made."""


def make_scheduler(
    num_blocks: int = 8, block_size: int = 4, max_model_len: int | None = None, **fields: Any
) -> Scheduler:
    """A scheduler over a pool that holds one request of `max_model_len` exactly, or more."""
    config = EngineConfig(**{"max_num_seqs": 4, "block_size": block_size, **fields})
    return Scheduler(config, max_model_len or num_blocks * block_size, num_blocks)


def make_requests(
    name: str, num_prompt_tokens: int, max_tokens: int, *, n: int = 1, seed: int = 0, **fields: Any
) -> Request:
    """A request with a prompt of its own, and its further completions, as the engine makes them."""
    params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    prompt = [zlib.crc32(f"{name}:{i}".encode()) % VOCAB_SIZE for i in range(num_prompt_tokens)]
    leader = Request(name, prompt, params, seed=seed, **fields)
    COMPLETIONS[leader] = further = [leader]
    for index in range(1, n):
        fork = Request(
            f"{name}/{index}",
            prompt,
            params,
            seed=seed + index,
            index=index,
            **fields,
        )
        further.append(fork)
    return leader


def completions(leader: Request) -> list[Request]:
    """A request and its further completions."""
    return COMPLETIONS.get(leader, [leader])


def is_done(leader: Request) -> bool:
    """Whether all completions of a prompt are finished."""
    return all(completion.is_finished for completion in completions(leader))


def next_token(token_ids: list[int], seed: int) -> int:
    """What `PagedDevice` samples after these tokens."""
    return zlib.crc32(f"{seed}:{token_ids}".encode()) % VOCAB_SIZE


def expected_tokens(request: Request, num_tokens: int) -> list[int]:
    """The output of a request that nobody disturbs."""
    token_ids = list(request.prompt_token_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, request.seed))
    return token_ids[request.num_prompt_tokens :]


class PagedDevice:
    """Carries out plans on KV memory of lists, and checks that each row sees its own context."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.block_size = scheduler.config.block_size
        num_host_blocks = scheduler.preempter.host.pool.num_blocks
        self.blocks = [[-1] * self.block_size for _ in range(scheduler.kv.pool.num_blocks)]
        self.host_blocks = [[-1] * self.block_size for _ in range(num_host_blocks)]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Carry out a plan at once."""
        sampled = self.run(plan)
        return LaunchedStep(lambda: sampled)

    def reset(self) -> None:
        """After an exception: whoever reads on what was there before is caught."""
        for blocks in (self.blocks, self.host_blocks):
            blocks[:] = [[-9] * self.block_size for _ in blocks]

    def run(self, plan: StepPlan) -> dict[str, list[SampledToken]]:
        """Move blocks, write, read, sample."""
        for source, target in plan.swap_outs:
            self.host_blocks[target] = list(self.blocks[source])
        for source, target in plan.swap_ins:
            self.blocks[target] = list(self.host_blocks[source])
        copied = [list(self.blocks[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, copied, strict=True):
            self.blocks[target] = content
        for row in plan.rows:
            for position, token in enumerate(row.token_ids, row.start):
                block, offset = divmod(position, self.block_size)
                self.blocks[row.blocks[block]][offset] = token
        for row in plan.rows:  # only now: nobody may have written into another's block
            context = [token for block in row.blocks for token in self.blocks[block]][: row.end]
            wanted = row.request.token_ids[: row.end] + draft_token_ids(row)
            assert context == wanted, row.request.request_id
        return {
            request.request_id: sampled_tokens(request, draft_token_ids(row))
            for row in plan.rows
            for request in row.sampling_requests
        }


def sampled_tokens(request: Request, guesses: list[int]) -> list[SampledToken]:
    """The guesses that have come true, and the token behind them."""
    known, tokens = list(request.token_ids), []
    token_id = next_token(known, request.seed)
    for guess in guesses:
        if guess != token_id:
            break
        tokens.append(SampledToken(token_id))
        known.append(token_id)
        token_id = next_token(known, request.seed)
    return [*tokens, SampledToken(token_id)]


class Clairvoyant:
    """Guesses what `PagedDevice` will sample, and is wrong now and then."""

    def __init__(self, rng: random.Random, error_rate: float) -> None:
        self.rng, self.error_rate = rng, error_rate

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens."""
        known = list(request.token_ids)
        for _ in range(self.rng.randint(0, num_tokens)):
            is_wrong = self.rng.random() < self.error_rate
            known.append(next_token(known, request.seed) ^ is_wrong)
        return known[request.num_tokens :]


def step(scheduler: Scheduler, device: PagedDevice) -> StepPlan:
    """One step of the engine's loop, with invariants checked."""
    plan = scheduler.schedule()
    assert plan.rows, "unfinished requests, and nothing planned"
    scheduler.update(plan, device.run(plan))
    scheduler.check_invariants()
    return plan


def step_until_preemption(scheduler: Scheduler, device: PagedDevice) -> StepPlan:
    """Steps up to the first that preempts."""
    while not (plan := step(scheduler, device)).preempted:
        pass
    return plan


def waiting_ids(scheduler: Scheduler) -> list[str]:
    """Who waits, in the order of the queue."""
    return [request.request_id for request in scheduler.waiting]


def run_to_end(scheduler: Scheduler, device: PagedDevice | None = None) -> list[str]:
    """All steps that are left, each as a line."""
    device, lines = device or PagedDevice(scheduler), []
    while scheduler.has_unfinished_requests():
        lines.append(plan_line(step(scheduler, device)))
        scheduler.drain_events()
    return lines


def plan_line(plan: StepPlan) -> str:
    """A plan as a line: `a[0:6]@0,1 | +a`; a row is who, tokens and block table.

    Then who came (+), came back (^) or was preempted (-), and what moves: `out 1>0` from device to
    host, `in 0>3` from host to device, `copy 1>2`.
    """
    rows = [
        f"{row.request.request_id}[{row.start}:{row.end}]@{','.join(map(str, row.blocks))}"
        for row in plan.rows
    ]
    notes = [f"+{request.request_id}" for request in plan.admitted]
    notes += [f"^{request.request_id}" for request in plan.resumed]
    notes += [f"-{preemption.request.request_id}" for preemption in plan.preempted]
    moves = {"out": plan.swap_outs, "in": plan.swap_ins, "copy": plan.copies}
    notes += [f"{what} {s}>{t}" for what, pairs in moves.items() for s, t in pairs]
    return " ".join(rows) + (" | " + " ".join(notes) if notes else "")


def add_all(scheduler: Scheduler, *requests: Request) -> None:
    """Queue requests in the order of their arrival."""
    for arrival, request in enumerate(requests):
        for completion in completions(request):
            completion.arrival = arrival
        scheduler.add(*completions(request))
