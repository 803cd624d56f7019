"""The steps of M2's course: each is traffic, what a step of it must be, and why."""

from __future__ import annotations

from typing import Any

from exercises.build.check import Parts, Step, Wrong
from exercises.build.device import Ask
from exercises.build.final import check_engine, check_random_traffic
from exercises.build.skeleton import File
from exercises.build.traffic import At, play
from m2_batching import EngineConfig

MILESTONE = "m2_batching"
TITLE = "continuous batching: the scheduler (60 to 90 minutes)"
DONE = """All of it. Now let it serve, beside ours:

  python -m m2_batching.demo --scheduler exercises/build/m2/scheduler.py --explore runs/mine.html
  python -m m2_batching.bench --set scheduler=exercises/build/m2/scheduler.py
  python -m m2_batching.serve --scheduler exercises/build/m2/scheduler.py

m2_batching/scheduler.py is ours. What is said there otherwise?"""

FILES = [
    File(
        "m2_batching/scheduler.py",
        """M2, written by you: iteration-level scheduling (Orca, OSDI '22, section 3, S1).

A step first gives each running request its next token, then admits waiting ones while rows, the
token budget and regions last. A request that finishes leaves in the same step; the next step gives
its place to another request. Prefill and decode rows share a step.

    python -m exercises.build m2         what to write next, and what is wrong with it
    python -m exercises.build m2 3       step 3 alone

What you need to know of the rest, some five minutes:

- `Request` (milestone_llm/core/request.py): `num_computed_tokens` have their keys and values in the
  cache, `num_uncomputed_tokens` are known and have not: the whole prompt at first, later the token
  that was sampled last. You never change these two: the base class does, after the step.
- `StepPlan` and `ScheduledRequest` (milestone_llm/core/plan.py): a step, and a row of it. A request
  that must wait is named in `plan.waiting_reasons`, with the reason.
- `self.waiting` is a `RequestQueue` (milestone_llm/core/request_queue.py): `peek`, `pop`, `add`; it
  is true while somebody waits. `self.running` is a list of requests.
- `self.kv` is a `RegionManager` (m2_batching/regions.py): `can_allocate`, `describe`, `allocate`,
  `free`, `reset`; `regions` has the region of each request that has one, by request id.
- `BaseScheduler` (milestone_llm/core/scheduler.py) takes requests in, hands sampled tokens to them,
  and takes finished ones out of `self.running`; then it calls `free_memory`.""",
        {
            "Scheduler.schedule": "begin with an empty StepPlan(). Step 1: while somebody waits, "
            "take the next one out of the queue and admit it. Step 2 puts the running requests "
            "before that: their rows, then those of the admitted.",
            "Scheduler.reason_to_wait": "step 3: compare the number of running requests with "
            "self.config.max_num_seqs. The text is for people; it names the limit and its value. "
            "Nothing in the way: None.",
            "Scheduler._admit": "ask self.kv for a region; request.become(RequestStatus.RUNNING); "
            "the request belongs into self.running and plan.admitted, its row into plan.rows.",
            "Scheduler._row": "a ScheduledRequest needs the request, where it goes on (start), how "
            "many tokens are new, and in `blocks` a list with the number of its region.",
            "Scheduler.free_memory": "step 4: self.kv.free takes the id of a request. One that is "
            "aborted while it waits has no region.",
            "Scheduler.reset_memory": "step 6: the RegionManager has a method for it.",
        },
    )
]


def scheduler(parts: Parts, max_model_len: int = 64, **fields: Any) -> Any:
    """A scheduler of the reader's."""
    return parts.Scheduler(EngineConfig(**{"max_num_seqs": 3, **fields}), max_model_len)


def check_first_request(parts: Parts) -> None:
    """One request, one step."""
    own = scheduler(parts)
    own.add(*Ask("a", 4, 1).requests(0, 64))
    plan = own.schedule()
    if not plan.rows:
        raise Wrong("a waits alone, and the plan has no row: a should be admitted.")
    row = plan.rows[0]
    told = f"row of a: start={row.start}, num_new_tokens={row.num_new_tokens}, blocks={row.blocks}"
    if (row.start, row.num_new_tokens) != (0, 4):
        raise Wrong(
            f"{told}\nNothing of a's prompt of 4 tokens is computed: start 0, 4 new tokens."
        )
    if row.blocks != [own.kv.regions.get("a")]:
        raise Wrong(f"{told}\nself.kv.regions is {own.kv.regions}: blocks is [the region of a].")
    (request,) = own.running or [None]
    if request is None or request.status.name != "RUNNING":
        raise Wrong(
            f"After schedule(), self.running is {own.running} and a's status "
            f"{row.request.status.name}: a runs now."
        )
    if len(own.waiting):
        raise Wrong("a runs, and is still in the queue: the next step would admit it again.")
    if plan.admitted != [request]:
        raise Wrong(f"plan.admitted is {plan.admitted}: a was admitted in this step.")


def check_decode(parts: Parts) -> None:
    """Running requests get a row at every step."""
    play(
        scheduler(parts),
        {0: [Ask("a", 4, 9)], 2: [Ask("b", 2, 9)]},
        [
            At("a[0:4] +a"),
            At("a[4:5]", "a runs; step 0 sampled its token 4, whose KV is not there yet."),
            At("a[5:6] b[0:2] +b", "b has come. Running requests have their rows first."),
            At(
                "a[6:7] b[2:3]", "both run: one token each. Prefill and decode are one kind of row."
            ),
        ],
        is_whole=False,
    )


def check_rows(parts: Parts) -> None:
    """First come, first served, in at most `max_num_seqs` rows."""
    full = "max_num_seqs=2 rows are taken. Whoever does not fit waits, and is not lost."
    limit = "max_num_seqs|KV|region"  # there are as many regions as rows: either may be asked first
    play(
        scheduler(parts, max_num_seqs=2),
        {0: [Ask("a", 4, 9), Ask("b", 2, 9), Ask("c", 3, 9)], 1: [Ask("d", 1, 9)]},
        [
            At("a[0:4] b[0:2] +a +b", f"a and b came first; {full}", {"c": limit}),
            At("a[4:5] b[2:3]", full, {"c": limit}),
        ],
        is_whole=False,
    )


def check_finished(parts: Parts) -> None:
    """Whoever finishes leaves; its place is used in the next step."""
    arrivals = {0: [Ask("a", 2, 3), Ask("b", 2, 2), Ask("c", 2, 2)]}
    play(
        scheduler(parts, max_num_seqs=2),
        arrivals,
        [
            At("a[0:2] b[0:2] +a +b"),
            At("a[2:3] b[2:3]"),
            At("a[3:4] c[0:2] +c", "b got its last token in step 1. Its row and region are free."),
            At("c[2:3]", "a got its last token in step 2."),
        ],
    )

    def abort(own: Any, requests: Any) -> None:
        for name in "ac":
            own.finish(requests[name], "abort")

    arrivals = {0: [Ask(name, 2, 3) for name in "abcd"]}
    play(
        scheduler(parts, max_num_seqs=2),
        arrivals,
        [
            At("a[0:2] b[0:2] +a +b"),
            At("b[2:3] d[0:2] +d", "a, running, and c, waiting, were aborted: d has a's place."),
            At("b[3:4] d[2:3]"),
            At("d[3:4]"),
        ],
        {0: ("a, which runs, and c, which waits, are aborted", abort)},
    )


def check_budget(parts: Parts) -> None:
    """A step has a budget of tokens, and nobody overtakes."""
    play(
        scheduler(parts, max_num_seqs=5, max_num_batched_tokens=6),
        {0: [Ask(name, 2, 3) for name in "abc"], 1: [Ask("d", 4, 1), Ask("e", 1, 1)]},
        [
            At("a[0:2] b[0:2] c[0:2] +a +b +c"),
            At(
                "a[2:3] b[2:3] c[2:3]",
                "three decode rows leave 3 of 6 tokens. d needs 4 and waits. e would fit, but came "
                "after d: nobody overtakes, or a long prompt could wait for ever.",
                {"d": "4"},
            ),
            At("a[3:4] b[3:4] c[3:4]", "the same as in step 1.", {"d": "4"}),
            At("d[0:4] e[0:1] +d +e", "all 6 tokens are free: 4 for d, 1 for e."),
        ],
    )
    play(
        scheduler(parts, max_num_seqs=5, max_num_batched_tokens=6),
        {0: [Ask("a", 3, 3), Ask("b", 3, 1), Ask("c", 1, 1)], 1: [Ask("d", 5, 1)]},
        [
            At("a[0:3] b[0:3] +a +b", "3 + 3 tokens are just the budget of 6.", {"c": "1"}),
            At("a[3:4] c[0:1] +c", "a's decode and c leave 4 tokens; d needs 5.", {"d": "5"}),
            At("a[4:5] d[0:5] +d", "a's decode leaves 5 tokens, just what d needs."),
        ],
    )


def check_priority_and_memory(parts: Parts) -> None:
    """The queue says who is next; an exception gives all memory back."""
    next_in_queue = "the queue knows the order (`peek`, `pop`): here by priority, lower is sooner."
    play(
        scheduler(parts, max_num_seqs=1, policy="priority"),
        {0: [Ask("low", 2, 2, priority=9), Ask("mid", 2, 1, priority=5)], 1: [Ask("high", 2, 1)]},
        [
            At("mid[0:2] +mid", next_in_queue),
            At("high[0:2] +high", next_in_queue),
            At("low[0:2] +low", "nobody else waits."),
            At("low[2:3]"),
        ],
    )

    def restart(own: Any, requests: Any) -> None:
        own.restart([request for request in requests.values() if not request.is_finished])

    interruption = "an exception somewhere: all KV is dropped, requests keep their tokens"

    play(
        scheduler(parts, max_num_seqs=2, max_num_batched_tokens=6),
        {0: [Ask("a", 3, 6), Ask("b", 2, 6)]},
        [
            At("a[0:3] b[0:2] +a +b"),
            *(At(f"a[{n + 1}:{n + 2}] b[{n}:{n + 1}]") for n in (2, 3, 4)),
            At(
                "a[0:7] +a",
                "all memory was given back, so a's 3 + 4 tokens are computed again, and b's 2 + 4. "
                "a's are more than a step may have, and a would wait for ever. So a request for "
                "which a whole step is too small goes alone, when nobody runs.",
            ),
            At("a[7:8]", "a's decode leaves 5 tokens, and b needs 6.", {"b": "6"}),
            At("b[0:6] +b"),
            At("b[6:7]"),
        ],
        {3: (interruption, restart)},
    )
    play(
        scheduler(parts, max_num_seqs=2, max_num_batched_tokens=4),
        {0: [Ask("a", 1, 4), Ask("b", 3, 4)]},
        [
            At("a[0:1] b[0:3] +a +b"),
            At("a[1:2] b[3:4]"),
            At(
                "a[0:3] +a",
                "b's 3 + 2 tokens are more than a step may have: b goes alone, and a has a row.",
                {"b": "5"},
            ),
            At("a[3:4]", "a runs: b waits.", {"b": "5"}),
            At("b[0:5] +b", "nobody runs any more."),
            At("b[5:6]"),
        ],
        {1: (interruption, restart)},
    )


def check_traffic(parts: Parts) -> None:
    """Random traffic, the same decisions as M2's."""

    def make(kind: Any, rng: Any) -> Any:
        config = EngineConfig(
            max_num_seqs=rng.randint(1, 4),
            max_num_batched_tokens=rng.randint(8, 16),
            policy=rng.choice(("fcfs", "priority")),
        )
        return kind(config, 24)

    check_random_traffic(make, "m2_batching", parts)


def check_serves(parts: Parts) -> None:
    """A tiny model's tokens are those of M2."""
    check_engine("m2_batching", parts, max_num_seqs=3, max_num_batched_tokens=48)


STEPS = [
    Step(
        "a first request",
        "scheduler.py",
        "A request waits. `schedule` takes it out of the queue, `_admit` gives it a region and "
        "makes it a running request, `_row` is its row in the plan.",
        check_first_request,
    ),
    Step(
        "running requests decode",
        "scheduler.py",
        "A step begins with a row for each running request, in the order of `self.running`. Then "
        "those that wait are admitted.",
        check_decode,
    ),
    Step(
        "first come, first served, while rows last",
        "scheduler.py",
        "Write `reason_to_wait` for rows: at most `max_num_seqs` requests run. `schedule` asks "
        "about the head of the queue before it is popped. The first that has a reason to wait "
        "stays; the reason goes into `plan.waiting_reasons` under its id.",
        check_rows,
    ),
    Step(
        "a request that finishes leaves at once",
        "scheduler.py",
        "`update` of the base class takes a finished request out of `self.running` and calls "
        "`free_memory`, which you write. The next step has its place.",
        check_finished,
    ),
    Step(
        "the token budget",
        "scheduler.py",
        "The rows of a step have at most `max_num_batched_tokens` tokens. Running requests count "
        "first. A prompt is computed whole: one that does not fit into what is left waits, and "
        "nobody behind it overtakes.",
        check_budget,
    ),
    Step(
        "priorities, memory, and starting again",
        "scheduler.py",
        "The queue decides who is next. After an exception, `restart` of the base class calls "
        "`reset_memory` and queues all requests again with the tokens that they have, which may be "
        "more than a step's budget.",
        check_priority_and_memory,
    ),
    Step(
        "random traffic",
        "scheduler.py",
        "Nothing new to write: the same decisions as M2's scheduler, whatever comes.",
        check_traffic,
    ),
    Step(
        "your engine serves a model",
        "scheduler.py",
        "Nothing new to write: an engine with your scheduler gives the same tokens as M2.",
        check_serves,
        seconds=100,
        needs_model=True,
    ),
]
