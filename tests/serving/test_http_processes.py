"""HTTP in several processes: what a client is told does not depend on which of them it gets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from types import SimpleNamespace

import psutil
import pytest

from m3_paged import SamplingParams
from m4_prefix_chunked import EngineConfig
from milestone_llm.core.errors import InputError
from milestone_llm.serving import http_process, processes
from milestone_llm.serving.async_engine import MAX_MESSAGES, AsyncEngine
from milestone_llm.serving.command import serve_parser
from milestone_llm.serving.engine_client import EngineCoreOutputs, EngineRequest
from milestone_llm.serving.http_process import HttpProcess
from milestone_llm.serving.metrics import Metrics
from milestone_llm.serving.shared_counts import DELIVERY, Count, SharedCounts
from serving_helpers import (
    PATIENCE,
    http_request,
    is_running,
    read_answer,
    serve,
    stopped,
    wait_for,
)

M4 = "m4_prefix_chunked"
STREAM = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}
ABORTED = 'request_success_total{finished_reason="abort"}'
REFUSED = 'admission_rejections_total{reason="max_queued"}'


def https_of(server):
    """Pids of HTTP's processes, the first one first, and that of the engine, which starts last."""
    children = psutil.Process(server.process.pid).children()
    *https, engine = sorted(children, key=lambda each: (each.create_time(), each.pid))
    return [server.process.pid, *(each.pid for each in https)], engine.pid


def connect_to(server, pid):
    """A connection that this one of HTTP's processes has taken."""
    others = [each for each in https_of(server)[0] if each != pid]
    with stopped(*others):
        connection = server.connect()
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += connection.recv(65536)
    return connection


def ask(server, pid, method, path, body=None):
    """A connection on which this one of HTTP's processes is asked for something."""
    connection = connect_to(server, pid)
    connection.sendall(http_request(method, path, body))
    return connection


def wait_until_it_begins(connection):
    """Wait for the first byte of an answer, which stays there."""
    assert connection.recv(1, socket.MSG_PEEK) == b"H"


def metrics_of(server, pid):
    """As one of HTTP's processes tells them."""
    with ask(server, pid, "GET", "/metrics") as connection:
        return read_answer(connection)[2]


@pytest.fixture(scope="module")
def several(model_folder, tmp_path_factory):
    """M4 with HTTP in three processes, steps of 20 ms, two rows, and room for two who wait."""
    log = tmp_path_factory.mktemp("several") / "log"
    options = ("--http-processes", "3", "--max-num-seqs", "2", "--max-queued", "2")
    length = ("--max-model-len", "1024")
    with serve(M4, model_folder, log, *options, *length, step_seconds=0.02) as server:
        yield server


def test_each_stream_has_the_tokens_that_it_has_with_one_process(several, oracle):
    prompts = ["Hello", "x y z", "12345"]
    fields = {**STREAM, "max_tokens": 12}
    streams = [
        ask(several, pid, "POST", "/v1/completions", {**fields, "prompt": prompt})
        for pid, prompt in zip(https_of(several)[0], prompts, strict=True)
    ]
    texts = []
    for stream in streams:
        events = read_answer(stream)[2].split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
        stream.close()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert texts == [output.text for output in oracle.generate(prompts, params)]


def test_limits_and_figures_are_those_of_all_processes_together(several):
    first, second, third = https_of(several)[0]
    before = several.wait_until_idle()
    with (
        ask(several, first, "POST", "/v1/completions", STREAM),
        ask(several, second, "POST", "/v1/completions", STREAM),
        several.send("/v1/completions", STREAM),
        several.send("/v1/completions", STREAM),
    ):
        wait_for(lambda: several.metrics()["num_requests_running"] == 2)
        wait_for(lambda: several.metrics()["num_requests_waiting"] == 2)  # and these are the others
        for pid in (second, third):
            with ask(several, pid, "POST", "/v1/completions", STREAM) as refused:
                assert read_answer(refused)[0] == 429
        told = [
            line
            for pid in (first, second, third)
            for line in metrics_of(several, pid).splitlines()
            if line.startswith("milestone_llm:admission_rejections_total")
        ]
        assert {float(line.split()[-1]) for line in told} == {before.get(REFUSED, 0) + 2}
        assert len(told) == 3
    after = several.wait_until_idle()
    assert after[ABORTED] - before.get(ABORTED, 0) == 4
    with several.send("/v1/completions", {**STREAM, "max_tokens": 1}) as connection:
        assert read_answer(connection)[0] == 200, "there is room again"


def test_a_page_watches_whatever_process_it_has(several):
    first, second, _ = https_of(several)[0]
    with ask(several, second, "GET", "/trace") as stays:
        wait_until_it_begins(stays)
        with ask(several, first, "GET", "/trace") as goes:
            wait_until_it_begins(goes)
            with several.send("/v1/completions", {**STREAM, "max_tokens": 2}) as connection:
                read_answer(connection)
            wait_for(lambda: b'"finished":[{' in goes.recv(65536))
            wait_for(lambda: b'"finished":[{' in stays.recv(65536))
        with several.send("/v1/completions", {**STREAM, "max_tokens": 2}) as connection:
            read_answer(connection)
        wait_for(lambda: b'"finished":[{' in stays.recv(65536))


def two_streams(server):
    """A stream of the first process, one of the second, and the pids of all. To connect takes its
    time; the streams begin together, and go on for a second.
    """
    (first, second), engine = https_of(server)
    streams = [connect_to(server, pid) for pid in (first, second)]
    for stream in streams:
        stream.sendall(http_request("POST", "/v1/completions", {**STREAM, "max_tokens": 60}))
    for stream in streams:
        wait_until_it_begins(stream)
    return streams, (first, second, engine)


@pytest.fixture
def pair(model_folder, tmp_path):
    """A server of its own with HTTP in two processes."""
    with serve(
        M4, model_folder, tmp_path / "log", "--http-processes", "2", step_seconds=0.02
    ) as server:
        yield server


def test_on_sigterm_the_clients_of_all_processes_are_served_to_their_end(pair):
    streams, (first, second, engine) = two_streams(pair)
    with stopped(engine):
        for pid in (second, engine, first):  # as to a whole group; the others leave it to the first
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: "requests under way (2) may finish" in pair.log.read_text())
    assert all(read_answer(each)[2].endswith("data: [DONE]\n\n") for each in streams)
    assert pair.end() == 0
    assert not any(map(is_running, (first, second, engine)))


def test_when_a_process_is_killed_the_others_finish_and_the_server_ends(pair):
    (stays, lost), (_, second, engine) = two_streams(pair)
    with stopped(engine):  # so that nobody finishes meanwhile
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: pair.fetch("GET", "/health")[0] == 503)
        with pair.send("/v1/completions", STREAM) as late:
            status, _, body = read_answer(late)
    assert (status, "a process of HTTP was ended by SIGKILL" in body) == (503, True)
    assert read_answer(stays)[2].endswith("data: [DONE]\n\n")
    assert "[DONE]" not in read_answer(lost)[2]
    pair.process.join(PATIENCE)
    assert pair.process.exitcode == 1
    assert "The server ends: a process of HTTP was ended by SIGKILL" in pair.log.read_text()
    assert not is_running(engine)


def test_the_engines_death_is_told_to_the_clients_of_all_processes(pair):
    streams, (_, second, engine) = two_streams(pair)
    os.kill(engine, signal.SIGKILL)
    ends = [read_answer(each)[2].strip().split("\n\n")[-1] for each in streams]
    assert all("its process was ended by SIGKILL" in end for end in ends)
    pair.process.join(PATIENCE)
    assert pair.process.exitcode == 1
    assert not is_running(second)


def test_no_process_outlives_the_first(pair):
    _, (first, second, engine) = two_streams(pair)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not is_running(second) and not is_running(engine))


# --- without a server ----------------------------------------------------------------------------


def test_counts_of_all_processes_are_one():
    shared = SharedCounts(3)
    counts = [shared.of(number) for number in range(3)]
    for number, own in enumerate(counts):
        own.add(Count.COMPLETIONS, 10**number)
        for _ in range(number):
            own.note_delivery(0.003)
    counts[2].add(Count.COMPLETIONS, -100)
    for own in counts:
        assert (own.total(Count.COMPLETIONS), own.total(Count.CONNECTIONS)) == (11, 0)
        histograms = own.histograms()
        assert histograms[DELIVERY].buckets()[3:5] == [("0.002", 0), ("0.005", 3)]
        assert [each.sum for each in histograms.values()] == pytest.approx([0, 0, 0, 0.009])


def test_steps_wait_for_http_when_it_falls_far_behind():
    """Or what it has not taken would grow for as long as it is too slow. No token is lost."""
    num_steps = 5 * MAX_MESSAGES

    async def run():
        client = SimpleNamespace(
            info=SimpleNamespace(tokenizer=None),
            add_requests=lambda requests: None,
            abort=lambda request_id: None,
        )
        engine = AsyncEngine(client, Metrics("tiny"), max_choices=4)
        engine.event_loop = asyncio.get_running_loop()
        request = engine.open_request(1)
        params = SamplingParams(max_tokens=1000)
        request.start([EngineRequest("r", [1], params)], is_stream=True, deadline=None)

        def step():
            for _ in range(num_steps):
                engine.deliver(EngineCoreOutputs(request_ids=["r"], token_ids=[7]))

        stepping = threading.Thread(target=step)
        stepping.start()
        wait_for(lambda: len(engine._messages) == MAX_MESSAGES)
        stepping.join(0.05)  # far longer than all steps take
        assert stepping.is_alive()
        assert len(engine._messages) == MAX_MESSAGES
        num_tokens = 0
        while num_tokens < num_steps:
            (output,) = await request.outputs()
            num_tokens = len(output.token_ids)
        stepping.join(PATIENCE)
        assert not stepping.is_alive()
        request.close()

    asyncio.run(run())


def num_processes(*options, cores=16, has_gpu=True, monkeypatch=None):
    args = serve_parser(M4, None, EngineConfig).parse_args(options)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    devices = ["nvidia0"] if has_gpu else []
    fake = lambda folder: SimpleNamespace(glob=lambda pattern: devices)  # noqa: E731
    monkeypatch.setattr(http_process, "Path", fake)
    return http_process.num_http_processes(args)


def test_there_are_as_many_as_cores_allow_beside_a_gpu(monkeypatch):
    def number(*options, **machine):
        return num_processes(*options, **machine, monkeypatch=monkeypatch)

    assert [number(cores=cores) for cores in (2, 7, 8, 16, 128)] == [1, 1, 2, 2, 2]
    assert number(has_gpu=False) == number("--device", "cpu") == number("--debug") == 1
    assert number("--http-processes", "3", cores=2, has_gpu=False) == 3
    with pytest.raises(InputError, match="--http-processes 65 is more than 64"):
        number("--http-processes", "65")
    for options in (["--debug"], ["--replicas", "2"]):
        assert number(*options) == 1
        with pytest.raises(InputError, match="an engine with a process of its own"):
            number("--http-processes", "2", *options)


def test_one_that_cannot_start_is_said_in_one_line(monkeypatch):
    class Ended:
        exitcode = 3

        def start(self):
            pass

        kill = join = lambda self, seconds=None: None

    fake = SimpleNamespace(Pipe=processes.CONTEXT.Pipe, Process=lambda **options: Ended())
    monkeypatch.setattr(processes, "CONTEXT", fake)
    with (
        HttpProcess(1, None, None, None) as process,
        pytest.raises(InputError, match="a process of HTTP has ended with exit code 3"),
    ):
        process.wait_until_ready()
