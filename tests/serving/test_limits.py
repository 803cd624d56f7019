"""Crowds, deadlines, bodies beyond the limit; options that a server is given."""

import asyncio
import contextlib
import os
import resource
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from rich.console import Console

import m4_prefix_chunked.serve
from helpers.servers import byte_tokenizer, http_request, read_all, wait_for
from milestone_llm import consoles
from milestone_llm.core.errors import InputError
from milestone_llm.serving import command
from milestone_llm.serving import server as server_module
from milestone_llm.serving.api.async_engine import AsyncEngine
from milestone_llm.serving.api.errors import ApiError
from milestone_llm.serving.api.metrics import Metrics
from milestone_llm.serving.api.protocol import ChatRequest, CompletionRequest
from milestone_llm.serving.api.service import Service
from milestone_llm.serving.api.unsupported import MAX_NAMED, UnknownFields
from milestone_llm.serving.config import MAX_CONNECTIONS, ServerConfig
from milestone_llm.serving.connections.admission import FREE_BYTES, BodyLimits, RequestBody
from milestone_llm.serving.engine.client import EngineInfo
from milestone_llm.serving.server import Server

LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def full(slow):
    """The slow server, with as many inside as it takes."""
    slow.wait_until_idle()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(slow.send("/v1/completions", LONG))
        wait_for(lambda: slow.metrics()["num_requests_running"] == 2)
        wait_for(lambda: slow.metrics()["num_requests_waiting"] == 2)  # and these are the others
        yield slow
    slow.wait_until_idle()


def test_a_crowd_is_told_to_come_later(full):
    refused = 'admission_rejections_total{reason="max_queued"}'
    before = full.metrics().get(refused, 0)
    with pytest.raises(openai.RateLimitError) as raised:
        full.client().completions.create(model=full.model, prompt="a")
    assert raised.value.response.headers["retry-after"] == "1"
    assert raised.value.type == "rate_limit_error"
    assert full.metrics()[refused] - before == 1


@pytest.mark.parametrize(
    ("path", "announced", "begun", "status"),
    [
        ("/v1/completions", b"Content-Length: 1000", b"", 429),
        ("/tokenize", b"Content-Length: 100001", b"", 413),
        ("/tokenize", b"Transfer-Encoding: chunked", 2 * (b"10000\r\n%065536d\r\n" % 0), 413),
    ],
)
def test_what_is_too_much_is_refused_before_its_body_is_there(full, path, announced, begun, status):
    with full.connect() as connection:
        head, _, _ = http_request("POST", path, b"").partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: 0", announced)
        connection.sendall(head + b"\r\n\r\n" + begun)
        assert connection.recv(13) == b"HTTP/1.1 %d " % status
        if status == 429:
            read_all(connection)  # it hangs up, a second later


def test_bodies_that_come_together_have_the_room_that_they_announce():
    """Side by side they would share it out, until none of them fits."""
    limits = BodyLimits(10**6, FREE_BYTES)

    async def piece():
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    length = str(FREE_BYTES + FREE_BYTES // 2).encode()
    scope = {"type": "http", "headers": [(b"content-length", length)]}
    statuses = []
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            body = stack.enter_context(RequestBody(limits, scope, piece, piece))
            try:
                asyncio.run(body.receive())
                statuses.append(200)
            except ApiError as error:
                statuses.append(error.status_code)
    assert statuses == [200, 200, 503, 503]
    assert limits.num_bytes == 0


def test_a_deadline_ends_a_request(slow):
    before = slow.wait_until_idle()
    status, answer = slow.fetch("POST", "/v1/completions", {**LONG, "deadline": 0.2})
    assert (status, answer["error"]["type"]) == (504, "timeout_error")
    after = slow.wait_until_idle()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 900


def test_every_prompt_and_every_completion_counts(slow):
    slow.wait_until_idle()
    create = slow.client().completions.create
    assert len(create(model=slow.model, prompt=["a", "b"], n=2, max_tokens=1).choices) == 4
    with pytest.raises(openai.BadRequestError, match=r"6 completions.* 4 at a time"):
        create(model=slow.model, prompt=["a", "b", "c"], n=2, max_tokens=1)
    with slow.send("/v1/completions", {**LONG, "prompt": ["a", "b", "c"]}):
        wait_for(lambda: slow.metrics()["num_requests_running"])
        with pytest.raises(openai.RateLimitError):
            create(model=slow.model, prompt=["a", "b"], max_tokens=1)
    slow.wait_until_idle()


def shared_engine(num_keys, max_choices=12):
    """An engine that clients of several keys share."""
    info = EngineInfo("tiny", 64, 2, 64, 4, 64, frozenset(), None)
    client = SimpleNamespace(info=info, problem=None)
    return AsyncEngine(client, Metrics("tiny"), max_choices, num_keys)


def opened(engine, key, num_choices=1):
    """Its requests that are let in, until one is refused."""
    found = []
    with contextlib.suppress(ApiError):
        while True:
            found.append(engine.open_request(num_choices, key))
    return found


@pytest.mark.parametrize(
    ("num_keys", "most"), [(0, 12), (1, 12), (2, 6), (3, 8), (12, 11), (50, 11)]
)
def test_one_key_leaves_a_share_to_the_others(num_keys, most):
    engine = shared_engine(num_keys)
    heavy = opened(engine, "heavy")
    assert len(heavy) == most
    assert len(opened(engine, "light")) == 12 - most
    with pytest.raises(ApiError) as refused:
        engine.check_room(key_salt="heavy")
    assert refused.value.status_code == 429


def test_a_place_that_comes_free_goes_to_whoever_has_less_than_a_share():
    engine = shared_engine(4)
    heavy, light = opened(engine, "heavy"), opened(engine, "light")
    assert (len(heavy), len(light)) == (9, 3)
    for request in heavy[:4]:
        engine.close_request(request)
        assert not opened(engine, "heavy")
        assert len(opened(engine, "other") or opened(engine, "fourth")) == 1
    for request in heavy[4:7]:
        engine.close_request(request)
    assert opened(engine, "heavy", num_choices=1), "it has less than a share itself"


def test_more_completions_than_a_key_can_ever_have_are_refused_for_good():
    engine = shared_engine(3)
    for num_choices, status in ((9, 400), (8, 429)):
        opened(engine, "heavy")
        with pytest.raises(ApiError) as refused:
            engine.open_request(num_choices, "other")
        assert refused.value.status_code == status


def test_keys_are_counted_and_known_before_a_body_is_read(asked):
    """`/v1/...` of the heavy key is refused, the other's is not: it has no such model."""
    options = {"api_key": ["one", "two", "two"], "max_queued": 2}
    held = {}

    def hold(app):
        salt = app._salt_of("Bearer one")
        held[salt] = opened(app._engine, salt)

    for key, status in (("one", 429), ("two", 400)):
        fields = {"authorization": f"Bearer {key}", "path": "/v1/completions", "prepare": hold}
        assert asked("POST", options, **fields)[0] == status
    assert [len(requests) for requests in held.values()] == [2]


# --- the server's options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--host", " "], "--host is empty"),
        (["--api-key", "two words"], "a key is printable ASCII without spaces"),
        (["--allowed-origins", "http://a.example/"], "an origin is"),
        (["--max-queued", "0"], "max_queued must be at least 1"),
        (["--request-seconds", "1", "inf"], "seconds are a number"),
        (["--api-key-file", "/no/such/file"], "--api-key-file"),
        (["--autoscaling", "max_replicas=3"], "need --replicas"),
        (["--replicas", "2", "--trace", "console"], "--trace is for one engine"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(options, complaint, capsys):
    assert m4_prefix_chunked.serve.main(["--port", "0", "--model", "/no", *options]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_keys_need_not_stand_on_the_command_line(tmp_path, monkeypatch):
    """There every user of the machine can read them."""
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    monkeypatch.setenv("MILESTONE_LLM_API_KEY", "third")
    assert command._hidden_keys(path) == ["third", "first", "second"]


@pytest.fixture
def asked():
    """Ask a server with some options, without a socket: status and headers of its answer."""

    def ask(method, options, path="/v1/models/mine", prepare=lambda app: None, **fields):
        info = EngineInfo("tiny", 64, 2, 64, 4, 64, frozenset(), None)
        client = SimpleNamespace(info=info, problem=None)
        app = Server(client, ServerConfig(**options))._http.config.app
        prepare(app)
        fields = {"host": "localhost", **fields}
        headers = [
            (name.replace("_", "-").encode(), text.encode()) for name, text in fields.items()
        ]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        asyncio.run(app({**scope, "query_string": b""}, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"])

    return ask


def test_an_answer_has_the_id_of_its_request_and_the_name_that_was_chosen(asked):
    options = {"served_model_name": "mine"}
    status, headers = asked("GET", options, x_request_id="abc-1")
    assert (status, headers[b"x-request-id"]) == (200, b"abc-1")
    made = [asked("GET", options, x_request_id=given)[1] for given in ("é", "x" * 200)]
    assert [len(each[b"x-request-id"]) for each in made] == [32, 32]


def test_a_server_that_has_a_name_is_asked_by_that_name_even_with_a_key(asked):
    options = {"api_key": ["key"], "allowed_hosts": ["Models.example"]}
    for host, status in (("models.example:8000", 404), ("evil.example", 421)):
        assert asked("GET", options, host=host, authorization="Bearer key")[0] == status


def test_a_page_of_an_origin_that_is_allowed_may_use_the_server(asked):
    """Its browser first asks for leave, without the key."""
    page, wish = "http://chat.example", {"access_control_request_method": "POST"}
    options = {"api_key": ["key"], "allowed_origins": [page], "served_model_name": "mine"}
    for method, fields, status in (
        ("OPTIONS", wish, 200),
        ("GET", {"authorization": "Bearer key"}, 200),
        ("GET", {}, 401),  # and it can read why
    ):
        found, headers = asked(method, options, origin=page, **fields)
        assert (found, headers[b"access-control-allow-origin"]) == (status, page.encode())
    assert asked("OPTIONS", options, origin="http://evil.example", **wish)[0] == 400


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_no_page_brings_scripts_of_other_servers_into_this_origin(asked, path):
    assert asked("GET", {}, path=path)[0] == 404


# --- its log, its standard output -----------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("path", ["/dev/full", None, "closed"])
def test_a_server_goes_on_where_its_standard_output_cannot_be_written(path, monkeypatch):
    """Its disk may be full, or it was closed when the server began."""
    with open(os.devnull if path in (None, "closed") else path, "w") as output:
        monkeypatch.setattr(sys, "stdout", output if path else None)
        # One of its own: a console prints later what it could not print.
        monkeypatch.setattr(consoles, "console", Console())
        if path == "closed":
            output.close()
        command.open_missing_streams()
        command.announce("here I am", "and so on")
        if path == "/dev/full":
            output.flush()  # as Python does at its end


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_figures_are_logged_again_when_the_disk_has_room(monkeypatch, capsys):
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        server_module._print_stats("lost")
        with contextlib.suppress(OSError):
            full.close()
        patch.undo()
        server_module._print_stats("seen")
    assert capsys.readouterr().err == "seen\n"


def test_the_log_names_an_unknown_field_once_and_not_without_end(caplog):
    fields = UnknownFields("ignored")
    for _ in range(2):
        for number in range(300):
            fields.note([f"field{number}", "common"])
    text = caplog.text
    assert (text.count("'field0'"), text.count("'common'"), text.count("'field299'")) == (1, 1, 1)
    for number in range(2 * MAX_NAMED):
        fields.note([f"more{number}"])
    assert len(caplog.records) <= MAX_NAMED + 1
    assert "will not be" in caplog.records[-1].message


# --- the socket, threads --------------------------------------------------------------------------


def test_small_answers_are_not_held_back():
    """Nagle's algorithm would wait for what a client acknowledges late: 40 ms for each answer."""

    async def is_sent_at_once():
        found = asyncio.get_running_loop().create_future()

        class Connection(asyncio.Protocol):
            def connection_made(self, transport):
                accepted = transport.get_extra_info("socket")
                found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        listener = command._listen("127.0.0.1", 0)
        server = await asyncio.get_running_loop().create_server(Connection, sock=listener)
        async with server:
            with socket.create_connection(listener.getsockname()):
                return await found

    assert asyncio.run(is_sent_at_once())


def test_there_are_no_more_connections_than_files_may_be_open(monkeypatch):
    def limit(number):
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (number, number))

    limit(400)
    assert 100 < command._max_connections(None) < 400 - command.RESERVED_FILES
    assert command._max_connections(50) == 50
    with pytest.raises(InputError, match=r"300 connections .* `ulimit -n` 400"):
        command._max_connections(300)
    limit(100)
    with pytest.raises(InputError, match="raise it"):
        command._max_connections(None)
    limit(resource.RLIM_INFINITY)
    assert command._max_connections(None) == MAX_CONNECTIONS


@pytest.fixture
def service():
    """What the endpoints work with, without an engine."""
    info = EngineInfo("m", 64, 2, 64, 4, 198, frozenset(), byte_tokenizer())
    engine = SimpleNamespace(client=SimpleNamespace(info=info), max_choices=4)
    return Service(engine, has_page=False)


def test_a_deadline_counts_what_is_done_before_the_engine(service, monkeypatch):
    may_end, closed = threading.Event(), []
    opened = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(service.engine, "open_request", lambda *given: opened, raising=False)
    monkeypatch.setattr(service._grammars, "rule_of", lambda params: may_end.wait(60))
    body = CompletionRequest(prompt=[5], structured_outputs={"regex": "a"}, deadline=0.02)

    async def ask():
        with pytest.raises(ApiError, match=r"the deadline of 0\.02 s has passed") as refused:
            await service.answer(body, "")
        assert not may_end.is_set()
        may_end.set()
        return refused.value.status_code

    assert asyncio.run(ask()) == 504
    assert closed == [True]


def test_messages_are_counted_where_they_hold_nobody_up(service, monkeypatch):
    threads = []
    monkeypatch.setattr(
        service, "_check_length", lambda *args: threads.append(threading.current_thread().name)
    )
    messages = ChatRequest(messages=[{"role": "user", "content": "a", "x": [1] * 1000}]).messages
    asyncio.run(service.encode(messages, "messages"))
    assert threads == ["tokenizer_0"]
