"""Threads that bring requests which only the host can sample, while another thread steps.

Such a request ends the pipeline's lead for a step. Whether it does is asked of the plan that has
it, so it does not matter when in a step the request came.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import pytest

import m5_kernels
from engine_helpers import assert_empty, make_engine, random_prompts, tiny_model
from m1_single import RequestOutput, SamplingParams

NUM_RUNS = 20
PROMPTS = random_prompts([6, 3, 9, 4], seed=4)
MANY_STOPS = list(range(3, 63, 3))
KINDS = {
    "completions": {"n": 2},
    "many stops": {"min_tokens": 4, "stop_token_ids": MANY_STOPS},
    "plain": {},
}


def params_of(kind: str, number: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.7 * (number % 2), seed=number, max_tokens=10, ignore_eos=True, **KINDS[kind]
    )


def engine_of() -> Any:
    return make_engine(m5_kernels, tiny_model(num_hidden_layers=1), max_num_seqs=6)


def summary(output: RequestOutput) -> list[tuple[list[int], str | None]]:
    return [(each.token_ids, each.finish_reason) for each in output.outputs]


@functools.cache
def alone(kind: str, number: int) -> list[tuple[list[int], str | None]]:
    return summary(engine_of().generate(PROMPTS[number], params_of(kind, number))[0])


@pytest.fixture(autouse=True)
def restless():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("special", ["completions", "many stops"])
def test_while_one_thread_steps_others_add(special):
    engine = engine_of()
    expected = {
        f"{kind} {number}": alone(kind, number)
        for kind in (special, "plain")
        for number in range(len(PROMPTS))
    }
    for _ in range(NUM_RUNS):
        found: dict[str, Any] = {}
        errors: list[BaseException] = []

        def add(kind: str, errors: list[BaseException] = errors) -> None:
            try:
                for number, prompt in enumerate(PROMPTS):
                    name = f"{kind} {number}"
                    engine.add_request(prompt, params_of(kind, number), request_id=name)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=add, args=(kind,)) for kind in (special, "plain")]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = summary(output)
        for thread in threads:
            thread.join()
        assert errors == []
        assert found == expected
        assert_empty(engine)
