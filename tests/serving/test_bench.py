"""The serving bench: what it sends, what it counts, where it stops."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import m1_single
from helpers.servers import PATIENCE, descendants, is_running, wait_for
from milestone_llm.lab.bench.open_loop import Outcome, figures, send_all
from milestone_llm.lab.bench.serving import main
from milestone_llm.lab.bench.workloads import random_tokens, with_poisson_arrivals
from milestone_llm.serving import timed

GENEROUS = ["--seconds", "0.2", "--ttft-limit", "60000", "--itl-limit", "60000"]


def answered(due, *times, num_tokens=None):
    """A complete request whose tokens came so many seconds after it was due."""
    times = [due + time for time in times]
    return Outcome(due, due, times[-1], 200, True, times, num_tokens or len(times))


def test_figures_of_known_times():
    outcomes = [answered(0.0, place / 10, place / 10 + 0.02) for place in range(1, 12)]
    got = figures(outcomes, ttft_limit=801, itl_limit=30)
    ttft = [got[f"ttft_{what}"] for what in ("p50", "p95", "p99", "max")]
    assert ttft == pytest.approx([600, 1050, 1090, 1100])
    assert got["itl_p50"] == pytest.approx(20)
    assert got["tok_s"] == pytest.approx(22 / 1.12)
    assert (got["good"], got["most_inside"]) == (8, 11)
    slow = [answered(0.0, 0.1, 1.1), answered(0.0, 0.1, 1.1, num_tokens=11)]
    got = figures(slow, 200, 500)  # ten times as many tokens in as many events
    assert (got["good"], got["itl_mean"]) == (1, pytest.approx(1000))


def test_latency_counts_from_when_a_request_was_due():
    late = Outcome(1.0, 1.5, 2.0, 200, True, [1.75, 2.0], 2)
    got = figures([late], 1000, 1000)
    assert (got["ttft_max"], got["late_ms"]) == pytest.approx((750, 500))


def test_refused_and_failed_requests_have_no_latency():
    cut_off, nobody = Outcome(0.0, 0.0, 0.2, 200, False, [0.1], 0), Outcome(0.0, 0.0, 0.1)
    got = figures([cut_off, nobody, Outcome(0.0, 0.0, 0.1, 429)], 1000, 1000)
    assert (got["completed"], got["refused"], got["failed"], got["good"]) == (0, 1, 2, 0)
    assert (got["ttft_p50"], got["itl_p99"], got["tok_s"]) == (None, None, 0)


@pytest.mark.slow
def test_what_is_counted_is_what_the_server_counts(slow):
    before = slow.wait_until_idle()
    items = random_tokens(12, (4, 8), (20, 30), vocab_size=150)
    outcomes = asyncio.run(send_all(slow.url, with_poisson_arrivals(items, 200)))
    after = slow.wait_until_idle()
    got = figures(outcomes, 1000, 1000)
    refused = 'admission_rejections_total{reason="max_queued"}'
    assert got["refused"] == after[refused] - before.get(refused, 0) > 0
    assert (got["completed"] + got["refused"], got["failed"]) == (12, 0)
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert got["tok_s"] * got["seconds"] == pytest.approx(generated)


class FakeServer:
    """Streams four tokens to some requests and refuses all that follow; keeps their prompts."""

    def __init__(self, num_answered):
        self.prompts = []
        self._num_answered = num_answered
        self._loop = asyncio.new_event_loop()
        serving = asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._server = self._loop.run_until_complete(serving)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        self.prompts.append(str(json.loads(await reader.readexactly(length))["prompt"]))
        if len(self.prompts) > self._num_answered:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}")
        else:
            events = [{"choices": [{"index": 0, "text": "a"}]}] * 4
            events.append({"choices": [], "usage": {"completion_tokens": 4}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            writer.write("".join(["HTTP/1.1 200 OK\r\n\r\n", *lines, "data: [DONE]\n\n"]).encode())
        await writer.drain()
        writer.close()


def test_a_sweep_ends_where_the_server_refuses(tmp_path, capsys):
    record, table = tmp_path / "record.json", tmp_path / "sweep.md"
    with FakeServer(num_answered=4 + 8 + 4) as server:  # the warm-up, 8 of 8, 4 of 12
        words = ["--url", server.url, "--rate", "40", "--sweep", *GENEROUS]
        assert main([*words, "--json", str(record), "--markdown", str(table)]) == 0
    data = json.loads(record.read_text())
    shown = [(p["rate"], p["completed"], p["refused"], p["goodput"]) for p in data["points"]]
    assert shown == [(40, 8, 0, 40), (60, 4, 8, 20)]
    assert len(set(server.prompts)) == 24, "a prefix cache would know those of the rate before"
    out = " ".join(capsys.readouterr().out.split())
    assert "collapses at 60 a second: 33% are good" in out
    assert "| 60/s | 12 | 4 | 8 | 0 |" in table.read_text()


def test_a_server_that_serves_nothing_is_an_error_and_no_measurement(slow, tmp_path, capsys):
    assert main(["--url", "http://127.0.0.1:9", "--seconds", "1"]) == 2
    record = tmp_path / "record.json"
    too_long = ["--input-len", "5000", "5000", "--json", str(record)]
    assert main(["--url", slow.url + "/v1/", "--seconds", "1", *too_long]) == 2
    assert "max_model_len=" in capsys.readouterr().err
    assert not record.exists()


@pytest.mark.slow
def test_it_starts_and_ends_the_servers_itself(model_folder, tmp_path):
    record = tmp_path / "record.json"
    server = ["--model", str(model_folder), "--device", "cpu", "--threads", "1"]
    words = ["--milestones", "m4_prefix_chunked", "--rate", "20", *GENEROUS]
    assert main([*words, "--json", str(record), "--", *server]) == 0
    (point,) = json.loads(record.read_text())["points"]
    assert (point["server"], point["completed"], point["failed"]) == ("m4_prefix_chunked", 4, 0)


@pytest.mark.slow
def test_sigterm_ends_its_server_too():
    words = ["--milestones", "m2_batching", "--", "--model", "tiny-llama", "--device", "cpu"]
    command = [sys.executable, "-m", "milestone_llm.lab.bench.serving", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        # It, the server, and the server's engine; with the first comes a helper of Python's own.
        started = wait_for(lambda: len(found := descendants(bench.pid)) >= 2 and found)
        bench.terminate()
        assert bench.wait(PATIENCE) == 128 + signal.SIGTERM
    wait_for(lambda: not any(map(is_running, started)))


def test_steps_take_as_long_as_the_formula_says(monkeypatch):
    slept = []
    clock = SimpleNamespace(perf_counter=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(timed, "time", clock)
    runner = timed.WaitingRunner(step_ms=1000, token_ms=10)
    engine = m1_single.LLMEngine("tiny-llama", device="cpu", runner=runner)
    params = m1_single.SamplingParams(max_tokens=3, ignore_eos=True)
    outputs = engine.generate([[5] * 6, [5] * 4], params)
    assert [output.token_ids for output in outputs] == [[timed.TOKEN_ID] * 3] * 2
    assert slept == pytest.approx([1.12, 1.02, 1.02])  # the shorter prompt is padded to six
