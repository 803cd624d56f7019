"""A step that raises while blocks move: everything comes back, and later requests are right."""

from __future__ import annotations

import pytest

import m3_paged
from engine_helpers import (
    assert_empty,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
)
from m1_single import RequestOutput
from milestone_llm.core.plan import LaunchedStep, StepPlan

PROMPTS = random_prompts([9, 6, 7, 3], seed=11)

TELLING = {
    "swaps out": lambda plan: plan.swap_outs,
    "swaps in": lambda plan: plan.swap_ins,
    "forks": lambda plan: any(len(row.sampling_requests) > 1 for row in plan.rows),
    "copies": lambda plan: plan.copies,
    "preempts": lambda plan: plan.preempted,
    "resumes": lambda plan: plan.resumed,
}
CASES = [
    ("recompute", "forks"),
    ("recompute", "copies"),
    ("recompute", "preempts"),
    ("recompute", "resumes"),
    ("swap", "swaps out"),
    ("swap", "swaps in"),
]


class OutOfLuckError(Exception):
    pass


def break_in_step(engine, is_telling, *, is_late: bool) -> list[StepPlan]:
    """Raise in the first telling step: before anything is done, or where its tokens are due."""
    launch, broken = engine.runner.launch, []

    def out_of_luck():
        raise OutOfLuckError

    def breaking(plan):
        if broken or not is_telling(plan):
            return launch(plan)
        broken.append(plan)
        if not is_late:
            out_of_luck()
        launch(plan)
        return LaunchedStep(wait=out_of_luck)

    engine.runner.launch = breaking
    return broken


def run_until_it_raises(engine) -> dict[str, RequestOutput]:
    """Outputs of the steps that worked."""
    latest = {}
    try:
        while engine.has_unfinished_requests():
            latest |= {output.request_id: output for output in engine.step()}
    except OutOfLuckError:
        return latest
    pytest.fail("no step was telling")


@pytest.mark.parametrize("is_late", [False, True], ids=["before the moves", "after the forward"])
@pytest.mark.parametrize(("preemption", "what"), CASES, ids=[what for _, what in CASES])
def test_a_step_that_raises_gives_everything_back(preemption, what, is_late):
    engine = make_engine(
        m3_paged, max_model_len=20, block_size=4, kv_cache_tokens=40, preemption=preemption
    )
    broken = break_in_step(engine, TELLING[what], is_late=is_late)
    for number, prompt in enumerate(PROMPTS):
        n = 2 if number == 1 else 1
        engine.add_request(prompt, greedy(9, n=n), f"r{number}")

    final = run_until_it_raises(engine)
    scheduler = engine.scheduler
    assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0
    assert not any(victim.request.is_finished for victim in broken[0].preempted)

    final |= run_to_end(engine)
    assert final.keys() == {"r0", "r1", "r2", "r3"}
    num_errors = 0
    for number, prompt in enumerate(PROMPTS):
        expected = hf_greedy("llama", prompt, 9)
        for completion in final[f"r{number}"].outputs:
            num_errors += completion.finish_reason == "error"
            num_tokens = len(completion.token_ids)
            assert completion.token_ids == expected[:num_tokens]
            if completion.finish_reason != "error":
                assert (completion.finish_reason, num_tokens) == ("length", 9)
    assert num_errors == sum(len(row.sampling_requests) for row in broken[0].rows)
    assert_empty(engine)
    assert scheduler.preempter.host.pool.num_used == 0

    again = engine.generate(PROMPTS, greedy(5, n=2))
    for prompt, output in zip(PROMPTS, again, strict=True):
        expected = hf_greedy("llama", prompt, 5)
        assert [completion.token_ids for completion in output.outputs] == [expected] * 2
    assert_empty(engine)


def test_a_failed_step_is_traced_with_what_it_freed():
    engine = make_engine(m3_paged, max_model_len=20, block_size=4, trace="memory")
    break_in_step(engine, lambda plan: True, is_late=False)
    engine.add_request(PROMPTS[0], greedy(4, n=2), "a")
    with pytest.raises(OutOfLuckError):
        engine.step()
    (record,) = engine.tracer.records
    assert record.finished == [
        {"request_id": "a", "reason": "error"},
        {"request_id": "a/1", "reason": "error"},
    ]
    assert [event.type for event in record.events] == ["alloc", "share", "free", "free"]
    assert record.kv.used == 0
    (output,) = engine.step()
    assert [completion.finish_reason for completion in output.outputs] == ["error", "error"]
    assert not engine.has_unfinished_requests()
