"""Metrics are exact, named as vLLM's, and at rest the gauges are at 0."""

import re
import time

import pytest

from milestone_llm.core.outputs import RequestFacts
from milestone_llm.serving.api.metrics import OURS_ALONE, PREFIX, Metrics
from milestone_llm.serving.engine.client import EngineCoreOutputs, EngineReport, StepFigures
from serving_helpers import wait_for

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
    has_cache = server.log.read_text().startswith(("m4", "m5"))
    if has_cache:  # the second of each pair found its full blocks
        assert counted["prefix_cache_queries_total"] == 2 * 56
        assert counted["prefix_cache_hits_total"] == 16 + 32
    else:
        assert counted["prefix_cache_queries_total"] == 0


def test_gauges_show_who_is_there_and_return_to_zero(slow):
    slow.wait_until_idle()
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    with (
        slow.send("/v1/completions", body),
        slow.send("/v1/completions", body),
        slow.send("/v1/completions", body),
    ):
        wait_for(lambda: slow.metrics()["num_requests_running"] == 2)
        metrics = wait_for(lambda: (now := slow.metrics())["num_requests_waiting"] == 1 and now)
        assert metrics["num_requests_running"] == 2
        assert metrics['num_requests_waiting_by_reason{reason="capacity"}'] == 1
        assert 0 < metrics["kv_cache_usage_perc"] < 1
    slow.wait_until_idle()


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


def test_guesses_have_the_names_of_vllm():
    stats = {
        "spec_decode_num_drafts": 3,
        "spec_decode_num_draft_tokens": 9,
        "spec_decode_num_accepted_tokens": 5,
        "spec_decode_num_accepted_tokens_per_pos": [3, 1, 1],
    }
    page = Metrics("m").page([EngineReport(stats)])
    page = page if isinstance(page, str) else page.decode()
    labels = 'engine="0",model_name="m"'
    for name, number in (("drafts", 3), ("draft_tokens", 9), ("accepted_tokens", 5)):
        assert f"{PREFIX}spec_decode_num_{name}_total{{{labels}}} {number}.0" in page
    for position, number in enumerate((3, 1, 1)):
        name = f"{PREFIX}spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{name}{{{labels},position="{position}"}} {number}.0' in page
