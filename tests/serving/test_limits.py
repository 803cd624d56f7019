"""Crowds, strangers, bodies beyond the limit, deadlines."""

import asyncio
import contextlib
import resource
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest

import m4_prefix_chunked.serve
from m4_prefix_chunked import EngineConfig
from milestone_llm.core.errors import InputError
from milestone_llm.serving import command
from milestone_llm.serving.api.errors import ApiError
from milestone_llm.serving.api.protocol import ChatRequest
from milestone_llm.serving.api.service import Service
from milestone_llm.serving.command import serve_parser, spec_of
from milestone_llm.serving.connections.admission import FREE_BYTES, BodyLimits, RequestBody
from milestone_llm.serving.connections.connection import ConnectionLimits
from milestone_llm.serving.connections.limits import Limits
from milestone_llm.serving.engine.client import EngineInfo
from milestone_llm.serving.server import Server
from serving_helpers import byte_tokenizer, http_request, read_answer, serve, wait_for

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


def test_a_crowd_is_refused_before_its_bodies_are_read(full):
    with full.connect() as connection:
        head, _, _ = http_request("POST", "/v1/completions", b"").partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: 0", b"Content-Length: 1000")
        connection.sendall(head + b"\r\n\r\n")  # and no body at all
        assert read_answer(connection)[0] == 429


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


def test_a_large_body_is_refused_unread(slow):
    with slow.connect() as connection:
        head, _, _ = http_request("POST", "/tokenize", b"").partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: 0", b"Content-Length: 100001")
        connection.sendall(head + b"\r\n\r\n")
        status, _, body = read_answer(connection)
        assert (status, "larger than 100000 bytes" in body) == (413, True)


def test_a_large_body_of_unknown_length_is_refused_when_it_gets_there(slow):
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with slow.connect() as connection:
        head, _, _ = http_request("POST", "/tokenize", b"").partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        connection.sendall(head + b"\r\n\r\n" + part + part)
        assert read_answer(connection)[0] == 413


def test_a_deadline_ends_a_request(slow):
    before = slow.wait_until_idle()
    status, answer = slow.fetch("POST", "/v1/completions", {**LONG, "deadline": 0.2})
    assert (status, answer["error"]["type"]) == (504, "timeout_error")
    after = slow.wait_until_idle()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 900


def test_a_deadline_ends_a_stream_that_has_begun(slow):
    for deadline in (0.5, 2, 8):  # on a busy machine the first tokens take their time
        body = {**LONG, "deadline": deadline, "stream": True}
        status, events = slow.fetch("POST", "/v1/completions", body)
        if status == 200:
            break
    assert status == 200, "the first tokens were in time"
    assert f"the deadline of {deadline} s has passed" in events.strip().split("\n\n")[-1]


def test_keys(model_folder, tmp_path):
    prompt = "What one key has in the cache, another does not find."
    with serve(
        "m4_prefix_chunked", model_folder, tmp_path / "log", "--api-key", "ours", "theirs"
    ) as server:
        assert server.fetch("GET", "/health")[0] == 200
        for path in ("/metrics", "/v1/models", "/nothing"):
            assert server.fetch("GET", path)[0] == 401
        assert server.fetch("GET", "/metrics", Authorization="Bearer ours")[0] == 200
        assert server.fetch("GET", "/metrics", Authorization="Basic ours")[0] == 401
        for key in ("", "our", "ours2", "éé"):
            with pytest.raises(openai.AuthenticationError if key.isascii() and key else Exception):
                server.client(key).models.list()
        cached = []
        for key in ("ours", "theirs", "ours", "theirs"):
            client = server.client(key)
            usage = client.completions.create(model=server.model, prompt=prompt, max_tokens=1).usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
        assert cached == [0, 0, 48, 48]


def test_keys_need_not_stand_on_the_command_line(tmp_path, monkeypatch):
    """There every user of the machine can read them."""
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    monkeypatch.setenv(command.KEY_NAME, "third")
    assert command._hidden_keys(path) == ["third", "first", "second"]
    for bad in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match="--api-key-file"):
            command._hidden_keys(bad)
    monkeypatch.setenv(command.KEY_NAME, "é")
    with pytest.raises(InputError, match="printable ASCII"):
        command._hidden_keys(None)


def test_an_answer_has_the_id_of_its_request_and_the_name_that_was_chosen():
    info = EngineInfo("tiny", 64, 2, 64, 4, 64, frozenset(), None)
    limits = Limits(ConnectionLimits(8, 1, 1), model_name="mine")
    client = SimpleNamespace(info=info)
    app = Server(client, limits)._http.config.app
    assert client.info.model_name == "mine"

    def id_of(given):
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b""}
        scope["headers"] = [(b"host", b"localhost"), (b"x-request-id", given)]
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        asyncio.run(app(scope, receive, send))
        assert b'"mine"' in sent[1]["body"]
        return dict(sent[0]["headers"])[b"x-request-id"]

    assert id_of(b"abc-1") == b"abc-1"
    made = id_of(b"\xff"), id_of(b"x" * 200)
    assert made[0] != made[1]
    assert all(len(name) == 32 for name in made)


def test_bodies_that_come_together_have_the_room_that_they_announce():
    """Side by side they would share it out, until none of them fits."""
    limits = BodyLimits(10**6, FREE_BYTES)
    half = FREE_BYTES + FREE_BYTES // 2

    async def piece():
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    scope = {"type": "http", "headers": [(b"content-length", str(half).encode())]}
    with contextlib.ExitStack() as stack:
        bodies = [RequestBody(limits, scope, piece, piece) for _ in range(4)]
        got = []
        for body in [stack.enter_context(each) for each in bodies]:
            try:
                asyncio.run(body.receive())
                got.append(200)
            except ApiError as error:
                got.append(error.status_code)
    assert got == [200, 200, 503, 503]
    assert limits.num_bytes == 0


@pytest.mark.parametrize("key", ["", " ", "é", "two words", "a\tb", "a\n"])
def test_a_key_that_no_client_could_send_is_refused(key, capsys):
    with pytest.raises(SystemExit):
        m4_prefix_chunked.serve.main(["--api-key", key])
    assert "a key is printable ASCII without spaces" in capsys.readouterr().err


def test_a_page_of_an_origin_that_is_allowed_may_use_the_server():
    """Its browser first asks for leave, without the key."""
    info = EngineInfo("tiny", 64, 2, 64, 4, 64, frozenset(), None)
    limits = Limits(ConnectionLimits(8, 1, 1), ["key"], allowed_origins=["http://chat.example"])
    app = Server(SimpleNamespace(info=info), limits)._http.config.app
    wish = {"access-control-request-method": "POST"}
    wish["access-control-request-headers"] = "authorization,content-type"

    def ask(origin, method, **headers):
        fields = {"host": "localhost", "origin": origin, **headers}
        scope = {"type": "http", "method": method, "path": "/v1/models", "query_string": b""}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in fields.items()]
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        asyncio.run(app(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"]).get(b"access-control-allow-origin")

    page = "http://chat.example"
    assert ask(page, "OPTIONS", **wish) == (200, page.encode())
    assert ask(page, "GET", authorization="Bearer key") == (200, page.encode())
    assert ask(page, "GET") == (401, page.encode()), "and it can read why"
    assert ask("http://evil.example", "OPTIONS", **wish) == (400, None)
    parse = serve_parser("m4_prefix_chunked", None, EngineConfig).parse_args
    assert parse(["--allowed-origins", page, "*"]).allowed_origins == [page, "*"]
    with pytest.raises(SystemExit):
        parse(["--allowed-origins", f"{page}/"])  # no browser would send that


def test_it_is_open_to_this_machine_only_unless_told_otherwise():
    args = serve_parser("m4_prefix_chunked", None, EngineConfig).parse_args([])
    assert args.host == "127.0.0.1"


# --- the socket ----------------------------------------------------------------------------------


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


def test_a_second_server_at_a_port_ends_before_it_loads_a_model(capsys):
    with command._listen("127.0.0.1", 0) as first:
        port = str(first.getsockname()[1])
        assert m4_prefix_chunked.serve.main(["--model", "/no/such/model", "--port", port]) == 2
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_not_taken_for_all_hosts(host, capsys):
    assert m4_prefix_chunked.serve.main(["--host", host, "--port", "0", "--model", "/no"]) == 2
    assert "--host is empty" in capsys.readouterr().err


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
    assert command._max_connections(None) == command.MAX_CONNECTIONS


# --- threads and sizes ---------------------------------------------------------------------------


@pytest.fixture
def service():
    """What the endpoints work with, without an engine."""
    info = EngineInfo("m", 64, 2, 64, 4, 198, frozenset(), byte_tokenizer())
    engine = SimpleNamespace(client=SimpleNamespace(info=info), max_choices=4)
    return Service(engine, has_page=False)


def test_messages_are_counted_where_they_hold_nobody_up(service, monkeypatch):
    threads = []
    monkeypatch.setattr(
        service, "_check_length", lambda *args: threads.append(threading.current_thread().name)
    )
    messages = ChatRequest(messages=[{"role": "user", "content": "a", "x": [1] * 1000}]).messages
    asyncio.run(service.encode(messages, "messages"))
    assert threads == ["tokenizer_0"]


@pytest.mark.parametrize("max_model_len", [64, 2**17, 2**20])
def test_the_larger_the_model_the_larger_bodies_may_be_up_to_a_limit(service, max_model_len):
    client = service.engine.client
    client.info = replace(client.info, max_model_len=max_model_len)
    service.engine.max_choices = 512
    limits = Service(service.engine, has_page=False).json_limits
    assert limits.max_parts <= 2**18
    assert max_model_len < limits.max_values <= 2**18 + max(2**18, max_model_len)


def test_rows_are_left_to_the_engine_unless_a_number_is_given():
    parser = serve_parser("m4_prefix_chunked", None, EngineConfig)
    for options, expected in ([], None), (["--max-num-seqs", "8"], 8):
        fields = spec_of("m4_prefix_chunked", parser.parse_args(options)).fields
        assert fields.get("max_num_seqs") == expected
