"""Metrics are exact and named as vLLM's; the line of figures tells what ran since the last."""

import asyncio
import re
import time
from concurrent.futures import Future

import pytest

from milestone_llm.core.outputs import RequestFacts
from milestone_llm.serving.api.metrics import OURS_ALONE, PREFIX, Metrics, StatsLog
from milestone_llm.serving.engine.client import EngineCoreOutputs, EngineReport, StepFigures

VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    'num_requests_waiting_by_reason{reason="capacity"}',
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prompt_tokens_count",
    "request_generation_tokens_count",
    "iteration_tokens_total_count",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
}


def test_a_known_load_is_counted_exactly(server):
    before = server.wait_until_idle()
    create = server.client().completions.create
    for num_prompt_tokens, num_tokens in ((3, 1), (20, 7), (33, 10)):
        prompt = [num_prompt_tokens] * num_prompt_tokens
        for is_stream in (False, True):
            answer = create(
                model=server.model,
                prompt=prompt,
                max_tokens=num_tokens,
                stream=is_stream,
                extra_body={"ignore_eos": True},
            )
            list(answer)
    after = server.wait_until_idle()
    assert after.keys() >= VLLM_NAMES
    counted = {name: after[name] - before.get(name, 0) for name in after}
    expected = {
        "prompt_tokens_total": 2 * 56,
        "generation_tokens_total": 2 * 18,
        'request_success_total{finished_reason="length"}': 6,
        "time_to_first_token_seconds_count": 6,
        "inter_token_latency_seconds_count": 2 * 15,
        "e2e_request_latency_seconds_count": 6,
        "request_queue_time_seconds_count": 6,
        "request_prompt_tokens_sum": 2 * 56,
        "request_generation_tokens_sum": 2 * 18,
        "step_time_seconds_count": 2 * 18,  # one after the other: a step a token
        "step_batch_size_sum": 2 * 18,
    }
    assert {name: counted[name] for name in expected} == expected
    has_cache = re.search("^m[45]", server.log.read_text(), re.M)
    if has_cache:  # the second of each pair found its full blocks
        assert counted["prefix_cache_queries_total"] == 2 * 56
        assert counted["prefix_cache_hits_total"] == 16 + 32
    else:
        assert counted["prefix_cache_queries_total"] == 0


def test_with_several_engines_a_label_says_which():
    metrics = Metrics("tiny", "all")
    reports = [EngineReport({"running": place}, name) for place, name in enumerate(("a", "b"))]
    for name in ("a", "b"):
        metrics.of(name).note_first_token(7, 0.0, 1.0, None)
        metrics.of(name).note_steps([StepFigures(0.5, 3, 9)])
    page = metrics.page(reports).decode()
    for name, number in (("a", 0.0), ("b", 1.0)):
        labels = f'{{engine="{name}",model_name="tiny"}}'
        assert f"milestone_llm:num_requests_running{labels} {number}\n" in page
        assert f"milestone_llm:prompt_tokens_total{labels} 7.0\n" in page
        assert f"milestone_llm:step_batch_size_sum{labels} 3.0\n" in page
    assert page.count("# TYPE milestone_llm:prompt_tokens_total counter") == 1
    assert 'generation_tokens_total{engine="all",model_name="tiny"}' in page, "HTTP counts those"
    assert metrics.page(None).decode() == page, "as they were when they last answered"


def test_waits_are_right_when_an_engine_has_another_clock():
    """That of another machine, an hour ahead: scheduled 2 s after it was asked, told a second
    later.
    """
    now = time.perf_counter()
    message = EngineCoreOutputs(now + 3600, request_ids=["r"], token_ids=[5])
    message.facts["r"] = RequestFacts(first_scheduled_time=now + 3599)
    (output,) = message.arrived().outputs()
    metrics = Metrics("tiny")
    metrics.of("0").note_first_token(3, now - 3, message.time, output.facts)
    page = metrics.page(None).decode()
    for name, seconds in (("request_queue_time", 2), ("time_to_first_token", 3)):
        (waited,) = re.findall(rf"{name}_seconds_sum\S* (\S+)", page)
        assert float(waited) == pytest.approx(seconds, abs=0.5)


def test_every_metric_is_vllms_in_name_and_labels_or_is_said_to_be_ours_alone():
    """vLLM's as in vllm/v1/metrics/loggers.py; it labels all with `model_name` and `engine`."""
    metrics = Metrics("tiny")
    metrics.of("0")
    more = {"request_success": {"finished_reason"}, "num_requests_waiting_by_reason": {"reason"}}
    theirs = {name.partition("{")[0].removesuffix("_total") for name in VLLM_NAMES}
    theirs = {name.removesuffix("_count") for name in theirs} | {"request_success"}
    theirs |= {"spec_decode_num_accepted_tokens_per_pos"}
    names = set()
    for family in metrics.registry.collect():
        name = family.name.removeprefix(PREFIX)
        names.add(name.removesuffix("_total"))
        for sample in family.samples if name not in OURS_ALONE else ():
            assert set(sample.labels) - {"le"} == {"model_name", "engine"} | more.get(name, set())
    assert names == {name.removesuffix("_total") for name in theirs} | OURS_ALONE
    assert not theirs & OURS_ALONE


# --- the line every ten seconds -------------------------------------------------------------------


def stats(steps, running=0, waiting=0, used=0, hits=None):
    found = {"steps": steps, "running": running, "waiting": waiting}
    found["kv"] = {"used": used, "total": 40}
    if hits is not None:
        found["prefix_cache"] = {"queried_tokens": hits[0], "saved_tokens": hits[1]}
    return found


@pytest.fixture
def log():
    lines, now = [], [0.0]
    stats_log = StatsLog(lines.append, clock=lambda: now[0])

    def after(seconds, prompt, generation, *engines):
        now[0] += seconds
        stats_log.note(engines, {"prompt": prompt, "generation": generation})
        line, lines[:] = lines[-1:], []
        return line[0] if line else None

    return after


def test_rates_are_those_since_the_line_before_of_all_engines(log):
    engines = [stats(1, running=1, used=10), stats(1, 1, waiting=1, used=30, hits=(100, 25))]
    assert log(10, 100, 40, *engines) == (
        "prompt 10.0 tok/s, generation 4.0 tok/s, running 2, waiting 1, KV memory 50.0%, "
        "prefix hits 25.0%"
    )
    assert log(20, 100, 80, stats(2), stats(3)) == (
        "prompt 0.0 tok/s, generation 2.0 tok/s, running 0, waiting 0, KV memory 0.0%"
    )


def test_nothing_is_said_while_nothing_runs_and_a_silence_counts_in_no_rate(log):
    assert log(10, 0, 0, stats(0)) is None
    assert log(10, 9, 9, stats(3))
    assert log(10, 9, 9, stats(3)) is None
    assert "prompt 3.0 tok/s" in log(1, 12, 9, stats(4))
    assert log(10, 2, 2, stats(1)) is None, "an engine that began anew has no negative rate"


def test_it_asks_again_and_again_until_it_is_cancelled():
    class Client:
        num_steps = 0

        def report(self):
            self.num_steps += 1
            answer = Future()
            answer.set_result([EngineReport(stats(self.num_steps))])
            return answer

    lines = asyncio.Queue()

    async def three_lines():
        following = StatsLog(lines.put_nowait).follow(Client(), Metrics("tiny"), 0.001)
        task = asyncio.ensure_future(following)
        for _ in range(3):
            assert "generation" in await asyncio.wait_for(lines.get(), 60)
        task.cancel()

    asyncio.run(three_lines())
