"""The serving bench: what it sends, what it counts, where it stops."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import m1_single
from milestone_llm.lab.bench.workloads import random_tokens, with_poisson_arrivals
from milestone_llm.load.open_loop import Outcome, figures, send_all
from milestone_llm.serving import timed
from milestone_llm.serving.bench import main
from serving_helpers import PATIENCE, descendants, forked_server, is_running, wait_for

EVENT = {"choices": [{"index": 0, "text": "a"}]}


def answered(due, *times, num_tokens=None):
    """A complete request whose tokens came so many seconds after it was due."""
    times = [due + time for time in times]
    num_tokens = num_tokens or len(times)
    return Outcome(due, due, times[-1], 200, True, times, num_tokens)


# --- figures -------------------------------------------------------------------------------------


def test_figures_of_known_times():
    outcomes = [answered(0.0, place / 10, place / 10 + 0.02) for place in range(1, 12)]
    got = figures(outcomes, ttft_limit=801, itl_limit=30)
    assert [got[f"ttft_{what}"] for what in ("p50", "p95", "p99", "max")] == pytest.approx(
        [600, 1050, 1090, 1100]
    )
    assert got["itl_p50"] == pytest.approx(20)
    assert got["seconds"] == pytest.approx(1.12)
    assert got["good"] == 8
    assert got["tok_s"] == pytest.approx(22 / 1.12)
    assert got["most_inside"] == 11


def test_latency_counts_from_when_a_request_was_due():
    late = Outcome(1.0, 1.5, 2.0, 200, True, [1.75, 2.0], 2)
    assert figures([late], 1000, 1000)["ttft_max"] == pytest.approx(750)
    assert figures([late], 1000, 1000)["late_ms"] == pytest.approx(500)


def test_a_slow_stream_is_not_good_though_it_began_in_time():
    outcomes = [answered(0.0, 0.1, 1.1), answered(0.0, 0.1, 1.1, num_tokens=11)]
    assert figures(outcomes, 200, 500)["good"] == 1  # ten times as many tokens in as many events


def test_time_between_events_and_time_per_token_differ_where_events_carry_several():
    got = figures([answered(0.0, 0.1, 0.6, 1.1, num_tokens=11)], 1000, 1000)
    assert (got["itl_mean"], got["tpot_mean"]) == pytest.approx((500, 100))
    assert got["tokens_per_event"] == pytest.approx(11 / 3)


def test_refused_and_failed_requests_have_no_latency():
    cut_off = Outcome(0.0, 0.0, 0.2, 200, False, [0.1], 0)
    nobody = Outcome(0.0, 0.0, 0.1)
    refused = Outcome(0.0, 0.0, 0.1, 429)
    got = figures([cut_off, nobody, refused], 1000, 1000)
    assert (got["completed"], got["refused"], got["failed"], got["good"]) == (0, 1, 2, 0)
    assert (got["ttft_p50"], got["itl_p99"], got["tok_s"]) == (None, None, 0)


def test_requests_inside_are_counted_at_the_fullest_time():
    outcomes = [answered(0.0, 1.0), answered(0.5, 1.0), answered(1.25, 1.0), answered(5.0, 1.0)]
    assert figures(outcomes, 1000, 1000)["most_inside"] == 2


# --- against a server ----------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_counted_is_what_the_server_counts(slow):
    before = slow.wait_until_idle()
    items = random_tokens(12, (4, 8), (20, 30), vocab_size=150)
    outcomes = asyncio.run(send_all(slow.url, with_poisson_arrivals(items, 200)))
    after = slow.wait_until_idle()
    got = figures(outcomes, 1000, 1000)
    refused = 'admission_rejections_total{reason="max_queued"}'
    assert got["refused"] == after[refused] - before.get(refused, 0) > 0
    assert got["completed"] + got["refused"] == 12
    assert got["failed"] == 0
    done = [(item, outcome) for item, outcome in zip(items, outcomes, strict=True) if outcome.times]
    assert all(outcome.num_tokens == item.params.max_tokens for item, outcome in done)
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert got["tok_s"] * got["seconds"] == pytest.approx(generated)
    assert 1 <= got["most_inside"] <= got["completed"]


def test_nobody_at_the_address_is_a_failed_request():
    (outcome,) = asyncio.run(
        send_all("http://127.0.0.1:9", random_tokens(1, (1, 1), (1, 1), vocab_size=9))
    )
    assert figures([outcome], 1000, 1000)["failed"] == 1


class FakeServer:
    """Streams four tokens to some requests and refuses all that follow; keeps their bodies."""

    def __init__(self, num_answered, is_silent=False):
        self.bodies = []
        self._num_answered, self._is_silent = num_answered, is_silent
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
        self.bodies.append(json.loads(await reader.readexactly(length)))
        if len(self.bodies) > self._num_answered:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}")
        else:
            usage = {"choices": [], "usage": {"completion_tokens": 4}}
            events = [EVENT] * (1 if self._is_silent else 4) + [usage]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            head = "HTTP/1.1 200 OK\r\n\r\n"
            writer.write("".join([head, *lines, "data: [DONE]\n\n"]).encode())
        await writer.drain()
        writer.close()


GENEROUS = ["--ttft-limit", "60000", "--itl-limit", "60000"]


def swept(server, folder, *options):
    """Exit status and record of a bench of this server."""
    record = folder / "record.json"
    words = ["--url", server.url, "--seconds", "0.2", *GENEROUS, *options, "--json", str(record)]
    status = main(words)
    return status, json.loads(record.read_text())


def test_a_sweep_ends_where_the_server_refuses(tmp_path, capsys):
    table = tmp_path / "sweep.md"
    with FakeServer(num_answered=4 + 8 + 4) as server:  # the warm-up, 8 of 8, 4 of 12
        path = ["--markdown", str(table)]
        status, record = swept(server, tmp_path, "--rate", "40", "--sweep", *path)
    assert status == 0
    shown = [(p["rate"], p["completed"], p["refused"], p["failed"]) for p in record["points"]]
    assert shown == [(40, 8, 0, 0), (60, 4, 8, 0)]
    assert "collapses at 60 a second: 33% are good" in " ".join(capsys.readouterr().out.split())
    assert "| 60/s | 12 | 4 | 8 | 0 |" in table.read_text()


def test_never_more_is_good_in_a_second_than_is_offered(tmp_path):
    with FakeServer(num_answered=4 + 8) as server:  # all of the first rate, none of the second
        _, record = swept(server, tmp_path, "--rate", "40", "20", "--seed", "3")
    assert [point["goodput"] for point in record["points"]] == [40, 0]


def test_without_a_sweep_the_given_rates_are_measured_and_no_others(tmp_path):
    with FakeServer(num_answered=1000) as server:
        _, record = swept(server, tmp_path, "--rate", "20", "10")
    assert [point["rate"] for point in record["points"]] == [20, 10]


def test_a_seed_gives_the_same_requests_and_each_rate_others(tmp_path):
    sent = []
    for seed in ("0", "0", "1"):
        with FakeServer(num_answered=1000) as server:
            swept(server, tmp_path, "--rate", "20", "20", "--seed", seed)
        sent.append(sorted(str(body["prompt"]) for body in server.bodies))
    assert sent[0] == sent[1]
    assert not set(sent[0]) & set(sent[2])
    assert len(set(sent[0])) == len(sent[0]), "a prefix cache would know them"


def test_prompts_share_their_beginning_if_asked(tmp_path):
    lengths = ["--shared-len", "20", "--input-len", "3", "5"]
    with FakeServer(num_answered=1000) as server:
        swept(server, tmp_path, "--rate", "20", "20", *lengths)
    measured = [body["prompt"] for body in server.bodies[4:]]  # the warm-up's are others
    assert len({tuple(prompt[:20]) for prompt in measured}) == 1
    assert {len(prompt) for prompt in measured} <= {23, 24, 25}


def test_arrivals_are_those_of_the_seed_and_of_the_rate():
    items = random_tokens(2000, (1, 1), (1, 1), vocab_size=9)
    times = [[i.arrival_time for i in with_poisson_arrivals(items, 50, seed)] for seed in (0, 0, 1)]
    assert times[0] == times[1] != times[2]
    assert times[0][-1] == pytest.approx(40, rel=0.1)


def test_a_server_that_streams_no_text_is_refused(tmp_path, capsys):
    with FakeServer(num_answered=1000, is_silent=True) as server:
        assert main(["--url", server.url, "--rate", "20", "--seconds", "0.2"]) == 2
    assert "serve a model with a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--url", "http://127.0.0.1:9", "--", "--threads", "1"], "runs already"),
        (["--token-ms", "1"], "--token-ms goes with --step-ms"),
        (["--overhead", "0"], "--overhead takes a number from 1 on, mixed or nano; got '0'"),
        (["--overhead", "4", "--url", "http://127.0.0.1:9"], "needs a server of its own"),
    ],
)
def test_bad_options_end_with_a_message(options, complaint, capsys):
    assert main(options) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_it_starts_and_ends_the_servers_itself(model_folder, tmp_path):
    record = tmp_path / "record.json"
    server = ["--model", str(model_folder), "--device", "cpu", "--threads", "1"]
    words = ["--milestones", "m4_prefix_chunked", "--rate", "20", "--seconds", "0.2", *GENEROUS]
    assert main([*words, "--json", str(record), "--", *server]) == 0
    (point,) = json.loads(record.read_text())["points"]
    assert (point["server"], point["completed"], point["failed"]) == ("m4_prefix_chunked", 4, 0)


@pytest.mark.slow
def test_overhead_is_that_of_the_same_requests_in_three_ways(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("milestone_llm.load.overhead.running_server", forked_server)
    monkeypatch.setattr("milestone_llm.load.overhead.NUM_REFUSALS", 20)
    record = tmp_path / "record.json"
    words = ["--milestones", "m2_batching", "--overhead", "3", "--output-len", "5", "5"]
    words += ["--rounds", "1", "--step-ms", "5", "--json", str(record)]
    server = ["--model", str(model_folder), "--device", "cpu", "--max-model-len", "1024"]
    assert main([*words, "--", *server]) == 0
    (figures,) = json.loads(record.read_text())
    assert figures["server"] == "m2_batching"
    assert all(len(rounds) == 1 for rounds in figures["seconds"].values())
    seconds = {way: rounds[0] for way, rounds in figures["seconds"].items()}
    assert min(seconds.values()) >= 5 * 0.005, "five steps"
    rates = {way: 15 / each for way, each in seconds.items()}
    assert figures["tokens_per_second"] == pytest.approx(rates, rel=0.05)
    assert 1 <= figures["tokens_per_event"] <= 5
    assert figures["refused_per_second"] > 0


@pytest.mark.slow
def test_sigterm_ends_its_server_too():
    words = ["--milestones", "m2_batching", "--", "--model", "tiny-llama", "--device", "cpu"]
    command = [sys.executable, "-m", "milestone_llm.serving.bench", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        # It, the server, and the server's engine; with the first comes a helper of Python's own.
        started = wait_for(lambda: len(found := descendants(bench.pid)) >= 2 and found)
        bench.terminate()
        assert bench.wait(PATIENCE) == 128 + signal.SIGTERM
    wait_for(lambda: not any(map(is_running, started)))


def test_a_server_that_does_not_start_is_an_error(capsys):
    assert main(["--milestones", "m4_prefix_chunked", "--", "--host", " "]) == 2
    assert "the server did not start" in capsys.readouterr().err


def test_a_server_that_serves_nothing_is_an_error_and_no_measurement(slow, tmp_path, capsys):
    nobody = "http://127.0.0.1:9"
    assert main(["--url", nobody, "--seconds", "1"]) == 2
    assert f"{nobody} serves none of these requests" in capsys.readouterr().err
    record = tmp_path / "record.json"
    too_long = ["--input-len", "5000", "5000", "--json", str(record)]
    assert main(["--url", slow.url + "/v1/", "--seconds", "1", *too_long]) == 2
    assert "max_model_len=" in capsys.readouterr().err
    assert not record.exists()


def test_steps_take_as_long_as_the_formula_says(monkeypatch):
    slept = []
    clock = SimpleNamespace(perf_counter=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(timed, "time", clock)
    num_threads = []
    monkeypatch.setattr(torch, "set_num_threads", num_threads.append)  # for all tests after this
    engine = m1_single.LLMEngine("tiny-llama", device="cpu")
    timed.replace_runner(engine, step_ms=1000, token_ms=10)
    assert num_threads == [1]
    params = m1_single.SamplingParams(max_tokens=3, ignore_eos=True)
    outputs = engine.generate([[5] * 6, [5] * 4], params)
    assert [output.token_ids for output in outputs] == [[timed.TOKEN_ID] * 3] * 2
    assert slept == pytest.approx([1.12, 1.02, 1.02])  # the shorter prompt is padded to six
