"""The steps of M2's course: each is traffic, what a step of it must be, and why."""

from __future__ import annotations

from typing import Any

from exercises.build.check import Parts, step
from exercises.build.device import Ask
from exercises.build.final import check_engine, check_random_traffic
from exercises.build.session import session
from exercises.build.skeleton import File
from exercises.build.traffic import play
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
        "m2_batching/kv_cache_manager.py",
        {
            "KVCacheManager.free": "step 4: the request's region is free again (the lowest is "
            "given first), and not the request's any more. One that is aborted while it "
            'waits has no region. Event: KVEvent("free", request_id, [region]).',
            "KVCacheManager.reset": "step 6: no request has a region, and all are free. Whoever "
            'had one: KVEvent("free", request_id, [region]).',
        },
        """Steps 4 and 6. Begin with scheduler.py. `self.events` tells the trace what happens to
regions: append a `KVEvent` (milestone_llm/core/kv.py) where a hint says so.""",
    ),
    File(
        "m2_batching/scheduler.py",
        {
            "Scheduler.schedule": "begin with an empty StepPlan(). Step 1: while somebody waits, "
            "take the next one out of the queue and admit it. Step 2 puts the running requests "
            "before that: their rows, then those of the admitted.",
            "Scheduler.reason_to_wait": "step 3: compare the number of running requests with "
            "self.config.max_num_seqs. The text is for people; it names the limit and its value. "
            "Nothing in the way: None.",
            "Scheduler._admit": "self.kv.allocate gives it a region; "
            "request.become(RequestStatus.RUNNING); the request belongs into self.running and "
            "plan.admitted, its row into plan.rows.",
            "Scheduler._row": "a ScheduledRequest needs the request, where it goes on (start), how "
            "many tokens are new, and in `blocks` where its KV is: self.kv.blocks_of.",
        },
        """You write what raises NotImplementedError:

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
- `self.kv` is a `KVCacheManager` (kv_cache_manager.py, in this folder): `can_allocate`, `describe`,
  `allocate` and `blocks_of` take a request. `free` and `reset`, which you write, too, are called
  for you.
- `BaseScheduler` (milestone_llm/core/scheduler.py) takes requests in, hands sampled tokens to them,
  and takes finished ones out of `self.running`; then it calls `self.kv.free`.""",
    ),
]


def scheduler(parts: Parts, max_model_len: int = 64, **fields: Any) -> Any:
    """A scheduler of the reader's."""
    return parts.Scheduler(EngineConfig(**{"max_num_seqs": 3, **fields}), max_model_len)


@step("a first request", "scheduler.py")
def first_request(parts: Parts) -> None:
    """A request waits. `schedule` takes it out of the queue, `_admit` gives it a region and
    makes it a running request, `_row` is its row in the plan."""
    session(
        """
        >>> (a,) = Ask("a", 4).requests(0, 64)
        >>> scheduler.add(a)
        >>> plan = scheduler.schedule()
        >>> [row.request.request_id for row in plan.rows]  # a waits alone: it is admitted, and has
        ... # one row.
        ['a']
        >>> row = plan.rows[0]
        >>> (row.start, row.num_new_tokens)  # nothing of a's prompt of 4 tokens is computed.
        (0, 4)
        >>> (row.blocks, scheduler.kv.regions)  # `blocks` is a list with the region of a.
        ([0], {'a': 0})
        >>> (scheduler.running == [a], a.status.name)  # after schedule(), a runs.
        (True, 'RUNNING')
        >>> len(scheduler.waiting)  # a runs: the next step would admit it again.
        0
        >>> plan.admitted == [a]  # a was admitted in this step.
        True
        """,
        Ask=Ask,
        scheduler=scheduler(parts),
    )


@step("running requests decode", "scheduler.py")
def decode(parts: Parts) -> None:
    """A step begins with a row for each running request, in the order of `self.running`. Then
    those that wait are admitted."""
    play(
        scheduler(parts),
        """
        comes a(4, 9)
        a[0:4] +a
        a[4:5]               # a runs; step 0 sampled its token 4, whose KV is not there yet.
        comes b(2, 9)
        a[5:6] b[0:2] +b     # b has come. Running requests have their rows first.
        a[6:7] b[2:3]        # both run: one token each. Prefill and decode are one kind of row.
        ...
        """,
    )


@step("first come, first served, while rows last", "scheduler.py")
def rows(parts: Parts) -> None:
    """Write `reason_to_wait` for rows: at most `max_num_seqs` requests run. `schedule` asks
    about the head of the queue before it is popped. The first that has a reason to wait
    stays; the reason goes into `plan.waiting_reasons` under its id."""
    play(
        scheduler(parts, max_num_seqs=2),
        """
        comes a(4, 9) b(2, 9) c(3, 9)
        a[0:4] b[0:2] +a +b, c waits  # a and b came first; max_num_seqs=2 rows are taken. Whoever
                                      # does not fit waits, and is not lost.
        comes d(1, 9)
        a[4:5] b[2:3], c waits        # the same as in step 0.
        ...
        """,
    )


@step("a request that finishes leaves at once", "kv_cache_manager.py")
def finished(parts: Parts) -> None:
    """`update` of the base class takes a finished request out of `self.running` and calls `free`
    of the KV manager, which you write. The next step has its place."""
    play(
        scheduler(parts, max_num_seqs=2),
        """
        comes a(2, 3) b(2, 2) c(2, 2)
        a[0:2] b[0:2] +a +b
        a[2:3] b[2:3]
        a[3:4] c[0:2] +c     # b got its last token in step 1. Its row and region are free.
        c[2:3]               # a got its last token in step 2.
        """,
    )

    def abort(own: Any, requests: Any) -> None:
        for name in "ac":
            own.finish(requests[name], "abort")

    play(
        scheduler(parts, max_num_seqs=2),
        """
        comes a(2, 3) b(2, 3) c(2, 3) d(2, 3)
        a[0:2] b[0:2] +a +b
        then a, which runs, and c, which waits, are aborted
        b[2:3] d[0:2] +d     # a, running, and c, waiting, were aborted: d has a's place.
        b[3:4] d[2:3]
        d[3:4]
        """,
        abort,
    )


@step("the token budget", "scheduler.py")
def budget(parts: Parts) -> None:
    """The rows of a step have at most `max_num_batched_tokens` tokens. Running requests count
    first. A prompt is computed whole: one that does not fit into what is left waits, and
    nobody behind it overtakes."""
    play(
        scheduler(parts, max_num_seqs=5, max_num_batched_tokens=6),
        """
        comes a(2, 3) b(2, 3) c(2, 3)
        a[0:2] b[0:2] c[0:2] +a +b +c
        comes d(4, 1) e(1, 1)
        a[2:3] b[2:3] c[2:3], d waits  # three decode rows leave 3 of 6 tokens. d needs 4 and waits.
            # e would fit, but came after d: nobody overtakes, or a long prompt could wait for ever.
        a[3:4] b[3:4] c[3:4], d waits  # the same as in step 1.
        d[0:4] e[0:1] +d +e            # all 6 tokens are free: 4 for d, 1 for e.
        """,
    )
    play(
        scheduler(parts, max_num_seqs=5, max_num_batched_tokens=6),
        """
        comes a(3, 3) b(3, 1) c(1, 1)
        a[0:3] b[0:3] +a +b, c waits  # 3 + 3 tokens are just the budget of 6.
        comes d(5, 1)
        a[3:4] c[0:1] +c, d waits     # a's decode and c leave 4 tokens; d needs 5.
        a[4:5] d[0:5] +d              # a's decode leaves 5 tokens, just what d needs.
        """,
    )


@step("priorities, memory, and starting again", "scheduler.py")
def priority_and_memory(parts: Parts) -> None:
    """The queue decides who is next. After an exception, `restart` of the base class calls
    `reset` of the KV manager, which you write in kv_cache_manager.py, and queues all requests
    again with the tokens that they have. A request may then have more of them than a whole
    step: it goes alone, when nobody runs."""
    play(
        scheduler(parts, max_num_seqs=1, policy="priority"),
        """
        comes low(2, 2, priority=9) mid(2, 1, priority=5)
        mid[0:2] +mid        # the queue knows the order (`peek`, `pop`): here by priority, lower is
                             # sooner.
        comes high(2, 1)
        high[0:2] +high      # the queue knows the order.
        low[0:2] +low        # nobody else waits.
        low[2:3]
        """,
    )

    def restart(own: Any, requests: Any) -> None:
        own.restart([request for request in requests.values() if not request.is_finished])

    play(
        scheduler(parts, max_num_seqs=2, max_num_batched_tokens=6),
        """
        comes a(3, 6) b(2, 6)
        a[0:3] b[0:2] +a +b
        a[3:4] b[2:3]
        a[4:5] b[3:4]
        a[5:6] b[4:5]
        then an exception somewhere: all KV is dropped, requests keep their tokens
        a[0:7] +a                   # all memory was given back, so a's 3 + 4 tokens are computed
            # again, and b's 2 + 4. a's are more than a step may have, and a would wait for ever.
            # So a request for which a whole step is too small goes alone, when nobody runs.
        a[7:8], b waits             # a's decode leaves 5 tokens, and b needs 6.
        b[0:6] +b
        b[6:7]
        """,
        restart,
    )
    play(
        scheduler(parts, max_num_seqs=2, max_num_batched_tokens=4),
        """
        comes a(1, 4) b(3, 4)
        a[0:1] b[0:3] +a +b
        a[1:2] b[3:4]
        then an exception somewhere: all KV is dropped, requests keep their tokens
        a[0:3] +a, b waits          # b's 3 + 2 tokens are more than a step may have: b goes alone,
                                    # and a has a row.
        a[3:4], b waits             # a runs: b waits.
        b[0:5] +b                   # nobody runs any more.
        b[5:6]
        """,
        restart,
    )


@step("random traffic", "scheduler.py")
def random_traffic(parts: Parts) -> None:
    """Nothing new to write: the same decisions as M2's scheduler, whatever comes."""

    def make(kind: Any, rng: Any) -> Any:
        config = EngineConfig(
            max_num_seqs=rng.randint(1, 4),
            max_num_batched_tokens=rng.randint(8, 16),
            policy=rng.choice(("fcfs", "priority")),
        )
        return kind(config, 24)

    check_random_traffic(make, MILESTONE, parts)


@step("your engine serves a model", "scheduler.py", needs_model=True)
def serves(parts: Parts) -> None:
    """Nothing new to write: an engine with your scheduler gives the same tokens as M2."""
    check_engine(MILESTONE, parts, max_num_seqs=3, max_num_batched_tokens=48)
