"""Threads that bring requests which only the host can sample, while another thread steps.

Such a request ends the pipeline's lead for a step. Whether it does is asked of the plan that has
it, so it does not matter in the middle of what the request came.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import m5_kernels
from engine_helpers import assert_empty, make_engine, random_prompts, tiny_model
from m1_single import RequestOutput, SamplingParams

NUM_RUNS = 20
PROMPTS = random_prompts([6, 3, 9], seed=4)
KINDS: dict[str, dict[str, Any]] = {
    "completions": {"n": 2, "max_tokens": 6},
    "many stops": {"max_tokens": 6, "min_tokens": 5, "stop_token_ids": list(range(3, 199))},
    "plain": {"max_tokens": 40},
}


def params_of(kind: str, number: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=number, ignore_eos=True, **KINDS[kind])


def engine_of() -> Any:
    return make_engine(m5_kernels, tiny_model(num_hidden_layers=1), max_num_seqs=9)


Summary = list[tuple[list[int], str | None]]


def summary(output: RequestOutput) -> Summary:
    return [(each.token_ids, each.finish_reason) for each in output.outputs]


@functools.cache
def alone(kind: str, number: int) -> Summary:
    return summary(engine_of().generate(PROMPTS[number], params_of(kind, number))[0])


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("special", ["completions", "many stops"])
def test_requests_that_come_while_another_thread_steps_get_their_tokens(special, restless):
    engine = engine_of()
    numbers = range(len(PROMPTS))
    expected = {f"{kind} {n}": alone(kind, n) for kind in (special, "plain") for n in numbers}
    for _ in range(NUM_RUNS):
        found: dict[str, Summary] = {}

        def add(kind: str) -> None:
            for number in numbers:
                engine.add_request(PROMPTS[number], params_of(kind, number), f"{kind} {number}")

        def step(found: dict[str, Summary] = found) -> None:
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = summary(output)

        add("plain")
        step()
        thread = threading.Thread(target=add, args=(special,))
        thread.start()
        while thread.is_alive() or engine.has_unfinished_requests():
            step()
        thread.join()
        assert found == expected
        assert_empty(engine)


def test_a_chunk_does_not_end_the_lead_for_what_only_its_last_token_needs():
    engine = make_engine(m5_kernels, max_num_batched_tokens=8, max_model_len=64)
    engine.add_request([5] * 20, params_of("many stops", 0))
    num_ahead = []
    for _ in range(3):  # chunks of 8, 8 and 4 tokens; the last one samples
        engine.step()
        num_ahead.append(len(engine.core.in_flight))
    assert num_ahead == [1, 1, 0]
