"""The server's line of figures: what ran since the line before, and silence where nothing did."""

import asyncio
from collections import Counter
from concurrent.futures import Future

import pytest

from milestone_llm.serving.api.metrics import Metrics, StatsLog
from milestone_llm.serving.command import serve_parser
from milestone_llm.serving.engine.client import EngineReport


def report(steps, prompt, generation, running=0, waiting=0, used=0, hits=None):
    stats = {"steps": steps, "running": running, "waiting": waiting}
    stats["kv"] = {"used": used, "total": 40}
    if hits is not None:
        stats["prefix_cache"] = {"queried_tokens": hits[0], "saved_tokens": hits[1]}
    return stats, {"prompt": prompt, "generation": generation}


@pytest.fixture
def log():
    lines, now = [], [0.0]
    stats_log = StatsLog(lines.append, clock=lambda: now[0])

    def after(seconds, *reports):
        now[0] += seconds
        totals = Counter()
        for _, tokens in reports:
            totals.update(tokens)
        stats_log.note([stats for stats, _ in reports], totals)
        return lines[-1] if lines else None

    after.lines = lines
    return after


def test_rates_are_those_since_the_line_before(log):
    assert log(10, report(5, 100, 40, running=2, waiting=1, used=10)) == (
        "prompt 10.0 tok/s, generation 4.0 tok/s, running 2, waiting 1, KV memory 25.0%"
    )
    assert log(20, report(9, 100, 80, running=1)) == (
        "prompt 0.0 tok/s, generation 2.0 tok/s, running 1, waiting 0, KV memory 0.0%"
    )


def test_nothing_is_said_while_nothing_runs(log):
    log(10, report(0, 0, 0))
    assert log.lines == []
    log(10, report(3, 9, 9))
    log(10, report(3, 9, 9))
    assert len(log.lines) == 1
    assert "prompt 3.0 tok/s" in log(1, report(4, 12, 9)), "a silence counts in no rate"


def test_hits_of_the_prefix_cache_are_shown_where_there_is_one(log):
    assert log(10, report(1, 8, 1, hits=(100, 0))).endswith("prefix hits 0.0%")
    assert log(10, report(2, 9, 2, hits=(300, 100))).endswith("prefix hits 50.0%")
    assert "prefix" not in log(10, report(3, 9, 3, hits=(300, 100)))


def test_several_engines_are_added_up(log):
    line = log(10, report(1, 50, 10, running=1, used=10), report(1, 50, 30, running=2, used=30))
    assert "prompt 10.0 tok/s, generation 4.0 tok/s, running 3, waiting 0, KV memory 50.0%" in line


def test_an_engine_that_began_anew_gives_no_negative_rate(log):
    log(10, report(50, 500, 500))
    assert "prompt" not in "".join(log.lines[1:])
    log(10, report(2, 20, 20))
    assert len(log.lines) == 1


def test_it_asks_again_and_again_until_it_is_cancelled():
    class Client:
        num_steps = 0

        def report(self):
            self.num_steps += 1
            answer = Future()
            answer.set_result([EngineReport(report(self.num_steps, 0, 0)[0])])
            return answer

    lines, metrics = asyncio.Queue(), Metrics("tiny")

    async def three_lines():
        following = asyncio.ensure_future(
            StatsLog(lines.put_nowait).follow(Client(), metrics, 0.001)
        )
        found = [await asyncio.wait_for(lines.get(), 60) for _ in range(3)]
        following.cancel()
        return found

    assert all("generation" in line for line in asyncio.run(three_lines()))


def test_it_can_be_left_out_as_in_vllm():
    import m4_prefix_chunked

    parser = serve_parser("m4_prefix_chunked", None, m4_prefix_chunked.EngineConfig)
    assert parser.parse_args([]).disable_log_stats is False
    assert parser.parse_args(["--disable-log-stats"]).disable_log_stats is True
    fields = ["--policy", "priority", "--aging-seconds", "2.5"]
    assert parser.parse_args(fields).aging_seconds == 2.5
