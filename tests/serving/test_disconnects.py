"""A client that goes away takes its request with it, wherever the request is."""

import pytest

from helpers.servers import wait_for
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.serving.engine.client import EngineRequest
from milestone_llm.serving.engine.loop import EngineLoop

LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.mark.parametrize(
    ("prompt", "is_stream", "seen"),
    [
        ("short", False, "generation_tokens_total"),
        ("short", True, "generation_tokens_total"),
        ([5] * 1000, False, "iteration_tokens_total_sum"),  # 250 steps before the first token
    ],
)
def test_while_it_is_computed(slow, prompt, is_stream, seen):
    before = slow.wait_until_idle()
    with slow.send("/v1/completions", {"prompt": prompt, "stream": is_stream, **LONG}):
        wait_for(lambda: slow.metrics()[seen] > before[seen])
    after = slow.wait_until_idle()
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert generated < 900 if prompt == "short" else generated == 0
    assert aborted(after) - aborted(before) == 1


def test_while_it_waits(slow):
    before = slow.wait_until_idle()

    def start(prompt):
        return slow.send("/v1/completions", {"prompt": prompt, **LONG})

    with start("one"), start("two"):
        wait_for(lambda: slow.metrics()["num_requests_running"] == 2)
        with start("three"):
            wait_for(lambda: slow.metrics()["num_requests_waiting"] == 1)
        metrics = wait_for(lambda: (now := slow.metrics())["num_requests_waiting"] == 0 and now)
        assert metrics["num_requests_running"] == 2, "those who run go on"
        assert aborted(metrics) - aborted(before) == 1
    assert aborted(slow.wait_until_idle()) - aborted(before) == 3


def aborted(metrics):
    return metrics.get('request_success_total{finished_reason="abort"}', 0)


def test_its_row_and_memory_are_free_before_the_next_step(oracle):
    """The command comes while a step is computed; the step after it has one row less."""
    seen = []

    def deliver(message):
        running = [request.request_id for request in oracle.scheduler.running]
        seen.append((running, sorted(oracle.scheduler.kv.blocks.block_tables)))
        loop.abort("leaves")
        if len(seen) == 3:
            loop.stop()

    loop = EngineLoop(oracle)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    loop.add_requests([EngineRequest(name, [3, 4, 5], params) for name in ("leaves", "stays")])
    loop.run(deliver)
    both = (["leaves", "stays"], ["leaves", "stays"])
    assert seen == [both, (["stays"], ["stays"]), (["stays"], ["stays"])]
    assert not oracle.scheduler.has_unfinished_requests(), "stopping ends what is left"
