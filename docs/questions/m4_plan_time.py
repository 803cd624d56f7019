"""Where does the time of a plan go? 256 requests at once, and no model: schedulers need none.

Calls of the block manager and the prefix cache are timed, the outermost of each, and taken out of
the time of `schedule` and `update`. The clock's own cost (some 0.1 us a call) is in the figures.
"""

import random
import statistics
import time
from collections import Counter
from typing import Any

import m3_paged.scheduler
import m4_prefix_chunked.scheduler
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

NUM_REQUESTS, MAX_MODEL_LEN, NUM_BLOCKS = 256, 2048, 24_576
NUM_ROUNDS = 7


class Clock:
    """Seconds by part: a call inside a call belongs to the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.part = ""

    def watch(self, part: str, thing: Any) -> None:
        """Time every public method of an object."""
        for name in dir(type(thing)):
            if not name.startswith("_") and callable(getattr(type(thing), name)):
                setattr(thing, name, self.timed(part, getattr(thing, name)))

    def timed(self, part: str, method: Any) -> Any:
        def call(*args: Any, **fields: Any) -> Any:
            if self.part:
                return method(*args, **fields)
            self.part, start = part, time.perf_counter()
            try:
                return method(*args, **fields)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self.part = ""

        return call


def measure(package: Any, **fields: Any) -> list[float]:
    """Microseconds a step: in `schedule`, in `update`, and in each part of the two; then steps."""
    rng, clock = random.Random(0), Clock()
    config = package.EngineConfig(
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=16_384,
        max_model_len=MAX_MODEL_LEN,
        **fields,
    )
    scheduler = package.scheduler.Scheduler(config, MAX_MODEL_LEN, NUM_BLOCKS)
    clock.watch("blocks", scheduler.kv)
    if hasattr(scheduler, "prefix_cache"):
        clock.watch("cache", scheduler.prefix_cache)
    for number in range(NUM_REQUESTS):
        prompt = [rng.randrange(32_000) for _ in range(rng.randint(100, 1024))]
        params = SamplingParams(max_tokens=rng.randint(100, 1024), ignore_eos=True)
        scheduler.add(Request(f"r{number}", prompt, params, arrival=number))
    num_steps = 0
    while scheduler.has_unfinished_requests():
        start = time.perf_counter()
        plan = scheduler.schedule()
        clock.seconds["schedule"] += time.perf_counter() - start
        due = [request for row in plan.rows for request in row.sampling_requests]
        sampled = {each.request_id: [SampledToken(rng.randrange(32_000))] for each in due}
        start = time.perf_counter()
        scheduler.update(plan, sampled)
        clock.seconds["update"] += time.perf_counter() - start
        num_steps += 1
        scheduler.drain_events()
    parts = ("schedule", "update", "blocks", "cache")
    return [1e6 * clock.seconds[part] / num_steps for part in parts] + [num_steps]


print(
    f"{NUM_REQUESTS} requests, 100..1024 tokens in and out, medians of {NUM_ROUNDS} rounds in turn"
)
print("microseconds a step                             of both:")
print("                    steps  schedule  update  block tables  prefix cache   the rest")
ARMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "M3": (m3_paged, {}),
    "M4, caching off": (m4_prefix_chunked, {"enable_prefix_caching": False}),
    "M4": (m4_prefix_chunked, {}),
}
rounds = [
    {name: measure(package, **fields) for name, (package, fields) in ARMS.items()}
    for _ in range(NUM_ROUNDS)
]
for name in ARMS:
    of_each = zip(*(one[name] for one in rounds), strict=True)
    schedule, update, blocks, cache, steps = map(statistics.median, of_each)
    rest = schedule + update - blocks - cache
    print(
        f"{name:18}{steps:7,.0f}{schedule:10,.0f}{update:8,.0f}{blocks:14,.0f}{cache:14,.0f}{rest:11,.0f}"
    )
