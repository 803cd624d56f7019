"""Two replicas on Ray Serve behind one server: what clients, `/health` and `/metrics` see.

Starting Ray takes as long as many other tests, so all use one server, in the order in which they
stand here; the last one ends it.
"""

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from helpers.servers import descendants, is_running, read_all, read_answer, serve, wait_for
from m3_paged import SamplingParams
from milestone_llm.serving.command import serve_command
from milestone_llm.serving.engine.client import EngineRequest
from milestone_llm.serving.engine.process import EngineSpec

M4 = "m4_prefix_chunked"
PATIENCE = 240.0
SYSTEM = "You are one of two replicas, and each of you knows only what it was sent. "
KEY = {"Authorization": "Bearer ours"}
OTHER_KEY = {"Authorization": "Bearer theirs"}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    why = 'Ray is not installed: pip install -c constraints.txt -e ".[ray]"'
    pytest.importorskip("ray.serve", reason=why)
    log = tmp_path_factory.mktemp("replicas") / "log"
    options = ["--replicas", "2", "--max-num-seqs", "8", "--max-model-len", "1024"]
    options += ["--api-key", "ours", "theirs"]
    with serve(M4, model_folder, log, *options, patience=PATIENCE) as server:
        yield server


def complete(server, prompt, key=KEY, **body):
    body = {"prompt": prompt, "temperature": 0, **body}
    return server.fetch("POST", COMPLETIONS, body, **key)


def by_replica(server, name):
    """Values of a metric by replica."""
    page = server.fetch("GET", "/metrics", **KEY)[1]
    found = re.findall(rf'^milestone_llm:{name}\{{.*engine="(\w+)".*\}} (\S+)$', page, flags=re.M)
    return {replica: float(value) for replica, value in found}


def health(server):
    return server.fetch("GET", "/health")[0]


def replica_pids(server):
    commands = descendants(server.process.pid)
    return [pid for pid, command in commands.items() if command.startswith("ray::ServeReplica")]


def test_answers_are_those_of_one_engine(server, oracle):
    expected = oracle.generate(["Hello"], SamplingParams(temperature=0, max_tokens=24))[0].text
    status, answer = complete(server, "Hello", max_tokens=24)
    assert (status, answer["choices"][0]["text"]) == (200, expected)
    stream = server.client("ours").completions.create(
        model=server.model, prompt="Hello", temperature=0, max_tokens=24, stream=True
    )
    assert "".join(event.choices[0].text for event in stream) == expected
    answer = complete(server, "a", max_tokens=3, echo=True, logprobs=2, n=2)[1]
    assert [len(each["logprobs"]["tokens"]) for each in answer["choices"]] == [4, 4]


def test_what_an_engine_refuses_is_refused_in_its_words(server):
    status, answer = complete(server, "a" * 2000)
    assert status == 400
    assert "max_model_len=1024" in answer["error"]["message"]


def test_a_beginning_goes_where_it_is_cached_and_keys_are_kept_apart(server):
    before = by_replica(server, "prefix_cache_hits_total")
    assert len(before) == 2
    cached = []
    for question, key in (("1", KEY), ("2", KEY), ("3", KEY), ("4", OTHER_KEY), ("5", OTHER_KEY)):
        answer = complete(server, SYSTEM + question, key, max_tokens=1)[1]
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 64, 64, 0, 64]
    after = by_replica(server, "prefix_cache_hits_total")
    assert sum(after.values()) - sum(before.values()) == 3 * 64


def test_who_goes_away_is_forgotten_by_the_replica(server):
    with server.send(COMPLETIONS, {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}, **KEY):
        wait_for(lambda: sum(by_replica(server, "num_requests_running").values()))
    wait_for(lambda: not sum(by_replica(server, "num_requests_running").values()))
    assert sum(by_replica(server, "kv_cache_usage_perc").values()) == 0


def test_when_a_replica_ends_only_what_it_had_begun_to_tell_is_lost(server):
    """And when all have ended, the server says so until Ray has started others."""
    names = set(by_replica(server, "num_requests_running"))
    body = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    with contextlib.ExitStack() as stack:

        def send(number, is_stream):
            prompt = [40 + number] * 20
            call = server.send(COMPLETIONS, {**body, "prompt": prompt, "stream": is_stream}, **KEY)
            return stack.enter_context(call)

        streams = [send(number, is_stream=True) for number in range(4)]
        begun = [stream.recv(4096) for stream in streams]
        wholes = [send(number, is_stream=False) for number in range(4, 8)]
        wait_for(lambda: sum(by_replica(server, "num_requests_running").values()) == 8)
        assert min(by_replica(server, "num_requests_running").values()) > 0, "both have some"
        os.kill(replica_pids(server)[0], signal.SIGKILL)
        told = [
            (first + read_all(stream)).decode()
            for first, stream in zip(begun, streams, strict=True)
        ]
        lost = [text for text in told if "the replica that computed this request" in text]
        assert 0 < len(lost) < 4
        assert sum("[DONE]" in text for text in told) == 4 - len(lost)
        assert [read_answer(whole)[0] for whole in wholes] == [200] * 4, "they were asked again"
    assert health(server) == 200
    for pid in replica_pids(server):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: health(server) == 503)
    wait_for(lambda: health(server) == 200, PATIENCE)
    assert complete(server, "b", max_tokens=2)[0] == 200
    wait_for(lambda: len(by_replica(server, "num_requests_running")) == 2, PATIENCE)
    assert not names & set(by_replica(server, "num_requests_running")), "others, by other names"


def test_sigterm_ends_the_server_and_all_that_it_started(server):
    processes = descendants(server.process.pid)
    assert server.end() == 0
    wait_for(lambda: not any(map(is_running, processes)))


def test_without_ray_it_is_said_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert serve_command(M4, None, ["--port", "0", "--replicas", "2"]) == 2
    assert 'pip install "milestone-llm[ray]"' in capsys.readouterr().err


# --- one replica, without Ray --------------------------------------------------------------------


@pytest.fixture
def replica(monkeypatch, model_folder):
    """The class that Ray would run, in this process: an engine in a thread of its own."""
    if importlib.util.find_spec("ray") is None:  # only the names that it imports
        for name in ("ray", "ray.serve", "ray.serve.request_router"):
            monkeypatch.setitem(sys.modules, name, MagicMock())
        for name in ("actor", "ray_router"):
            monkeypatch.delitem(
                sys.modules, f"milestone_llm.serving.replicas.{name}", raising=False
            )
    actor = importlib.import_module("milestone_llm.serving.replicas.actor")
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(actor.serve, "get_replica_context", lambda: context)
    interval = sys.getswitchinterval()
    fields = {"max_num_seqs": 4, "max_model_len": 256, "device": "cpu"}
    replica = actor.Replica(EngineSpec("m3_paged", str(model_folder), fields))
    yield replica
    replica._loop.stop()
    sys.setswitchinterval(interval)


async def read(replica, request, ends=(), leaves=False):
    """Read a request's stream to its end. After the first outputs, HTTP ends some completions, or
    the client leaves."""
    outputs = replica.generate(request, None)
    await anext(outputs)
    for completion_id in ends:
        await replica.end_completion(completion_id)
    if leaves:
        await outputs.aclose()
    async for _ in outputs:
        pass


@pytest.mark.parametrize(
    ("n", "ends", "leaves"),
    [
        (1, ["r"], False),
        (3, ["r", "r/1", "r/2"], False),
        (3, ["r/1"], False),
        (3, ["r", "r/2"], True),
        (1, [], True),
    ],
)
def test_a_replica_keeps_nothing_of_a_request_that_http_has_ended(replica, n, ends, leaves):
    """HTTP finds stop strings, and ends completions one by one; others of the request go on."""
    params = SamplingParams(n=n, max_tokens=100, stop=("never",), ignore_eos=True)
    request = EngineRequest("r", [5, 6, 7], params, is_streamed=True)

    async def run():
        await asyncio.wait_for(read(replica, request, ends, leaves), 60)
        report = await replica.report()
        while report.stats["running"]:
            report = await replica.report()

    asyncio.run(run())
    assert not replica._queues
