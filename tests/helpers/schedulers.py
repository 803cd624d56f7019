"""Helpers for tests of schedulers: requests, plans as lines, and a scheduler with its device.

Schedulers run without a model, on the runner of `read_back`. It writes the KV of every row and
reads every context back through the tables: a block that is given out twice, swapped, copied or
found wrongly is noticed in the very step.

`prompt` names prompts by their blocks, so that one sees what they share: with blocks of 4,
`prompt("AB", 2)` is the block A, the block B and two tokens of its own.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from helpers.read_back import ReadBackRunner, right_output
from m4_prefix_chunked.prefix_cache import PrefixCache
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

M2, M3, M4 = "m2_batching", "m3_paged", "m4_prefix_chunked"
BLOCK_SIZE = 4
COMPLETIONS: dict[Request, list[Request]] = {}
"""Completions of requests that these helpers have made."""


def prompt(
    blocks: str, num_own: int = 0, *, block_size: int = BLOCK_SIZE, own: str = ""
) -> list[int]:
    """Return a prompt of named blocks and `num_own` further tokens that no other prompt has.

    Args:
        own: a name for the further tokens; equal names have equal tokens.
    """
    words = [f"{name}:{i}" for name in blocks for i in range(block_size)]
    words += [f"{blocks}/{own}:{i}" for i in range(num_own)]
    return [3 + zlib.crc32(word.encode()) % (VOCAB_SIZE - 3) for word in words]


def request_of(
    name: str,
    token_ids: list[int],
    max_tokens: int = 1,
    *,
    n: int = 1,
    seed: int = 0,
    salt: str = "",
    ignore_eos: bool = True,
    **fields: Any,
) -> Request:
    """Return a request with this prompt, and make its further completions as the engine does."""
    params = SamplingParams(
        max_tokens=max_tokens, n=n, seed=seed, ignore_eos=ignore_eos, cache_salt=salt
    )
    fields["eos_token_ids"] = frozenset({EOS_TOKEN_ID})
    own = [
        Request(
            f"{name}/{index}" if index else name,
            list(token_ids),
            params,
            seed=seed + index,
            index=index,
            **fields,
        )
        for index in range(n)
    ]
    COMPLETIONS[own[0]] = own
    return own[0]


def of_length(name: str, num_tokens: int, max_tokens: int = 1, **fields: Any) -> Request:
    """Return a request whose prompt no other request has."""
    return request_of(name, prompt("", num_tokens, own=name), max_tokens, **fields)


def completions(leader: Request) -> list[Request]:
    """Return a request and its further completions."""
    return COMPLETIONS.get(leader, [leader])


def make_scheduler(
    num_blocks: int = 8,
    block_size: int = BLOCK_SIZE,
    max_model_len: int | None = None,
    milestone: str = M4,
    **fields: Any,
) -> Any:
    """Return a milestone's scheduler with a pool that holds one request exactly, or more."""
    scheduler = importlib.import_module(f"{milestone}.scheduler").Scheduler
    config = importlib.import_module(f"{milestone}.config").EngineConfig
    limit, fields = max_model_len or num_blocks * block_size, {"max_num_seqs": 4, **fields}
    if milestone == M2:
        return scheduler(config(**fields), limit)
    return scheduler(config(block_size=block_size, **fields), limit, num_blocks)


class Life:
    """A scheduler with its device and its clock: arrivals get their number, steps become lines.

    Args:
        scheduler: one that is made already; else the arguments are those of `make_scheduler`.
    """

    def __init__(self, *args: Any, scheduler: Any = None, **fields: Any) -> None:
        self.scheduler = scheduler or make_scheduler(*args, **fields)
        self.device = ReadBackRunner(getattr(self.scheduler.config, "block_size", None))
        self.num_arrivals = 0

    @property
    def kv(self) -> Any:
        """The KV manager."""
        return self.scheduler.kv

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache."""
        return self.kv.prefix_cache

    @property
    def counts(self) -> dict[str, float]:
        """Counters of the prefix cache, evictions included."""
        return self.cache.stats()

    def add(self, *requests: Request) -> None:
        """Queue requests in the order of their arrival."""
        for request in requests:
            for completion in completions(request):
                completion.arrival = self.num_arrivals
            self.num_arrivals += 1
            self.scheduler.validate(request)
            self.scheduler.add(*completions(request))

    def plan(self) -> StepPlan:
        """Compute one step, and check invariants."""
        plan = self.scheduler.schedule()
        assert plan.rows, "unfinished requests, and nothing planned"
        self.scheduler.update(plan, self.device.run(plan))
        self.scheduler.check_invariants()
        return plan

    def line(self) -> str:
        """Compute one step. Returns it as `plan_line`."""
        return plan_line(self.plan())

    def run(self, *requests: Request) -> list[str]:
        """Add requests and compute until all are finished; check that each gets its tokens."""
        self.add(*requests)
        lines = []
        while self.scheduler.has_unfinished_requests():
            lines.append(self.line())
        for request in requests:
            assert_tokens(completions(request))
        return lines

    def steps(self, arrivals: Mapping[int, Sequence[Request]]) -> Iterator[StepPlan]:
        """Add requests before the given step, and yield each plan after it has been computed."""
        last, step = max(arrivals), 0
        while step <= last or self.scheduler.has_unfinished_requests():
            self.add(*arrivals.get(step, ()))
            if self.scheduler.has_unfinished_requests():
                yield self.plan()
            step += 1

    def run_to_preemption(self) -> StepPlan:
        """Compute steps up to the first that preempts."""
        while not (plan := self.plan()).preempted:
            pass
        return plan

    def fail(self) -> StepPlan:
        """Plan a step whose forward pass raises half way."""
        plan = self.scheduler.schedule()
        self.device.reset()
        self.scheduler.fail(plan)
        self.scheduler.check_invariants()
        return plan

    def abort(self, leader: Request) -> None:
        """End a request as the engine does: forks before the completion they fork from."""
        for completion in reversed(completions(leader)):
            if not completion.is_finished:
                self.scheduler.finish(completion, "abort")
        self.scheduler.check_invariants()


def assert_tokens(requests: Iterable[Request]) -> None:
    """Assert that finished requests got the same tokens as they would alone."""
    for request in requests:
        params, limit = request.sampling_params, request.max_num_tokens
        right = right_output(request.prompt_token_ids, params, limit, request.index)
        assert (request.output_token_ids, request.finish_reason) == right, request.request_id


def spans(plan: StepPlan) -> str:
    """Return which requests compute which tokens: `a[0:4] b[7:8]`; a padding row is `(a)`."""
    return " ".join(
        f"({row.request.request_id})"
        if row.is_padding
        else f"{row.request.request_id}[{row.start}:{row.end}]"
        for row in plan.rows
    )


def plan_line(plan: StepPlan) -> str:
    """Return a plan as a line: `a[0:6]@0,1 | +a`; a row is request, tokens and block table.

    Then come admitted (+), resumed (^) and preempted (-) requests, and moves: `out 1>0` from device
    to host, `in 0>3` from host to device, `copy 1>2`.
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
