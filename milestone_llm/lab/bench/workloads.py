"""Workloads: named sets of requests, and a loop that serves them as they arrive."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.outputs import RequestOutput

Progress = Callable[[int], None]
"""Called with the number of output tokens that are new since the last call."""


@dataclass(frozen=True)
class WorkItem:
    """One request of a workload, and when it arrives."""

    prompt: Any
    params: SamplingParams
    arrival_step: int = 0
    """The request is added before this step of the engine."""
    arrival_time: float = 0.0
    """The request is not added before this time, in seconds after the start."""
    priority: int = 0


CLASSIC_PROMPTS = (
    "Name a fruit.",
    "You are writing for a science magazine whose readers are curious but not experts. Explain "
    "why the sky is blue at noon and red at sunset.",
    "Write two sentences about the sea in winter.",
)
"""A short, a long and a medium prompt."""
CLASSIC_LENGTHS = (10, 100, 50)
"""Output tokens of the demos' requests. They differ, which is what batching is about."""


def exactly(num_tokens: int) -> SamplingParams:
    """Return greedy sampling of exactly `num_tokens` tokens; EOS is ignored."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def random_tokens(
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    *,
    vocab_size: int,
    seed: int = 0,
    temperature: float = 0.0,
) -> list[WorkItem]:
    """Return requests of random tokens, with lengths uniform in the given ranges, ends included.

    Every request generates its full length (`ignore_eos`), so all engines do the same work.
    """
    rng = random.Random(seed)
    work = (
        (
            [rng.randrange(vocab_size) for _ in range(rng.randint(*input_len))],
            rng.randint(*output_len),
        )
        for _ in range(num_requests)
    )
    return _items(work, temperature, seed)


def _items(work: Iterable[tuple[list[int], int]], temperature: float, seed: int) -> list[WorkItem]:
    """Return requests from pairs of a prompt and an output length; EOS is ignored."""
    return [
        WorkItem(prompt, SamplingParams(temperature, max_tokens=n, ignore_eos=True, seed=seed + i))
        for i, (prompt, n) in enumerate(work)
    ]


def mixed(vocab_size: int, seed: int = 0, **sizes: Any) -> list[WorkItem]:
    """Return 16 requests of 16..128 random tokens in and out, which a laptop can serve."""
    defaults = {"num_requests": 16, "input_len": (16, 128), "output_len": (16, 128)}
    return random_tokens(**{**defaults, **sizes}, vocab_size=vocab_size, seed=seed)


def nano(vocab_size: int, seed: int = 0, **sizes: Any) -> list[WorkItem]:
    """Return the public nano-vllm benchmark: 256 requests, 100..1024 tokens in and out, t = 0.6.

    Numbers are drawn in that benchmark's order (all prompts, then all output lengths), so that seed
    0 gives its 133,966 output tokens.
    """
    defaults = {"num_requests": 256, "input_len": (100, 1024), "output_len": (100, 1024)}
    options: dict[str, Any] = {**defaults, **sizes}
    rng = random.Random(seed)
    prompts = [
        # That benchmark draws ids in 0..10000 for every vocabulary.
        [rng.randint(0, 10000) % vocab_size for _ in range(rng.randint(*options["input_len"]))]
        for _ in range(options["num_requests"])
    ]
    lengths = [rng.randint(*options["output_len"]) for _ in prompts]
    return _items(zip(prompts, lengths, strict=True), 0.6, seed)


WORKLOADS: dict[str, Callable[..., list[WorkItem]]] = {"mixed": mixed, "nano": nano}


def with_poisson_arrivals(items: Sequence[WorkItem], rate: float, seed: int = 0) -> list[WorkItem]:
    """Return the same requests with random arrival times, `rate` requests a second on average."""
    rng, now, arriving = random.Random(seed), 0.0, []
    for item in items:
        arriving.append(replace(item, arrival_time=now))
        now += rng.expovariate(rate)
    return arriving


def serve(
    engine: Any,
    items: Sequence[WorkItem],
    *,
    chat: bool = False,
    on_step: Callable[[list[RequestOutput]], None] | None = None,
) -> list[RequestOutput]:
    """Add each item when it arrives, and step until all are finished.

    Args:
        on_step: called with the outputs of every step, to show progress.

    Returns:
        Final outputs in the order of `items`.
    """
    arrivals = [(item.arrival_step, item.arrival_time) for item in items]
    pending = sorted(range(len(items)), key=arrivals.__getitem__)
    started, step = time.perf_counter(), 0
    ids: dict[str, int] = {}
    outputs: dict[int, RequestOutput] = {}
    try:
        while pending or engine.has_unfinished_requests():
            now = time.perf_counter() - started
            is_idle = not engine.has_unfinished_requests()
            if is_idle and pending:  # nothing to compute: wait for the next arrival
                step = max(step, items[pending[0]].arrival_step)
                time.sleep(min(max(0.0, items[pending[0]].arrival_time - now), 60.0))
                now = time.perf_counter() - started
            while pending and items[pending[0]].arrival_step <= step:
                item = items[pending[0]]
                if item.arrival_time > now:
                    break
                request_id = engine.add_request(
                    item.prompt, item.params, priority=item.priority, chat=chat
                )
                ids[request_id] = pending.pop(0)
            if engine.has_unfinished_requests():
                changed = engine.step()
                done = [out for out in changed if out.finished and out.request_id in ids]
                outputs.update({ids[out.request_id]: out for out in done})
                if on_step is not None:
                    on_step(changed)
            step += 1
    except BaseException:  # Ctrl-C or an error: leave no request in the engine
        with contextlib.suppress(Exception):  # the engine may not work any more
            for request_id in ids:
                engine.abort(request_id)
        raise
    return [outputs[index] for index in range(len(items))]


@contextlib.contextmanager
def token_count(
    description: str,
    total: int,
    is_hidden: bool = False,
    newest_text: Callable[[], str] = str,
) -> Iterator[Progress]:
    """Show a line that counts `total` output tokens, with the end of the newest text after it.

    It is no live display, because a live display would not work with `breakpoint()`. It is not
    shown in a log, or under `python -m pdb`.

    Yields:
        A function to call after each step.
    """
    from milestone_llm.consoles import log_console
    from milestone_llm.trace.text import plural

    is_hidden = is_hidden or not log_console.is_terminal or sys.gettrace() is not None
    num_tokens, next_update = 0, 0.0

    def show(text: str) -> None:
        if not is_hidden:
            log_console.print(text.ljust(log_console.width - 1), end="\r", markup=False)

    def progress(num_new: int) -> None:
        nonlocal num_tokens, next_update
        num_tokens += num_new
        now = time.perf_counter()
        if now > next_update:  # a step on a GPU is short
            count = f"{description}  {num_tokens:,} of {plural(total, 'token')}"
            room = max(0, log_console.width - len(count) - 5)
            text = " ".join(newest_text().split())
            show(f"{count}   {text[-room:] if room else ''}")
            next_update = now + 0.1

    try:
        yield progress
    finally:
        show("")
