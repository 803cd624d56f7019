"""Nothing that a client sends harms another, and each is told what was wrong."""

import contextlib
import json
import os
import random
import select
import socket
import time

import pytest

from helpers.servers import PATIENCE, http_request, read_answer, serve, wait_for
from milestone_llm.serving.connections.connection import MAX_HEAD_BYTES, MAX_WITHOUT_PLACE

COMPLETIONS = "/v1/completions"


def test_other_models_other_paths_other_methods(m4):
    status, answer = m4.fetch("POST", COMPLETIONS, {"prompt": "a", "model": "gpt-5"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'tiny-bytes'" in answer["error"]["message"]
    status, answer = m4.fetch("POST", "/v1/embeddings", {})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    for path in ("/v1/responses", "/v1/chat/completions"):
        assert path in answer["error"]["message"]
    assert m4.fetch("GET", COMPLETIONS)[0] == 405
    with m4.connect() as probe:
        probe.sendall(http_request("HEAD", "/health"))
        status, _, body = read_answer(probe)
        assert (status, body) == (200, "")


def test_a_client_that_does_not_read_gets_it_all_in_the_end(m4):
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    expected = m4.fetch("POST", COMPLETIONS, body)[1]["choices"][0]["text"]
    with m4.send(COMPLETIONS, {**body, "stream": True, "logprobs": 20}) as connection:
        m4.wait_until_idle()  # the engine does not wait for it
        _, _, answer = read_answer(connection)
    *events, last = answer.strip().split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(each.removeprefix("data: ")) for each in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


# --- clients that do not keep to HTTP's turns -----------------------------------------------------

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SECONDS = 2.0
NUM_CONNECTIONS = 8
MAX_BODY, MAX_BODIES = 200_000, 200_000


@pytest.fixture(scope="module")
def guarded(model_folder, tmp_path_factory):
    """A server with little patience and little room."""
    limits = ["--request-seconds", str(SECONDS), str(SECONDS)]
    limits += ["--max-connections", str(NUM_CONNECTIONS), "--max-body-bytes", str(MAX_BODY)]
    limits += ["--max-bodies-bytes", str(MAX_BODIES), "--max-num-seqs", "2"]
    limits += ["--allowed-hosts", "Models.example"]
    log = tmp_path_factory.mktemp("guarded") / "log"
    with serve("m2_batching", model_folder, log, *limits, "--max-model-len", "64") as server:
        yield server
        assert "Traceback" not in log.read_text()


def rest_of(connection):
    """What the server still sends before it hangs up."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def is_served(server):
    """Whether somebody else gets an answer."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return server.fetch("POST", "/tokenize", {"prompt": "a"})[0] == 200
    return False


@pytest.mark.parametrize(
    "begun",
    [GET + b"X: ", *(POST + CHUNKED + last for last in (b"0\r\nX: ", b"1;"))],
    ids=["header", "trailer", "chunk"],
)
def test_nothing_is_taken_without_an_end(guarded, begun):
    with guarded.connect() as connection:
        connection.sendall(begun)
        with contextlib.suppress(ConnectionError):
            for _ in range(16 * 2**20 // MAX_HEAD_BYTES):
                connection.sendall(b"a" * MAX_HEAD_BYTES)
            pytest.fail("16 MiB were taken")
    assert is_served(guarded)


def test_a_head_that_is_too_large_is_refused_in_words(guarded):
    with guarded.connect() as connection:
        connection.sendall(GET + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert "larger than 65536 bytes" in json.loads(body)["error"]["message"]
    with guarded.connect() as connection:
        connection.sendall(GET + b"X: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n")
        assert connection.recv(15).startswith(b"HTTP/1.1 200 ")


def test_one_deadline_for_the_head_and_one_for_the_body_however_it_trickles(guarded):
    begun = {
        "idle": b"",
        "half a head": GET,
        "a trickling head": GET + b"X: ",
        "half a body": POST + b"Content-Length: 100\r\n\r\n",
        "a trickling body": POST + b"Content-Length: 100000\r\n\r\n",
        "trickling chunks": POST + CHUNKED,
        "an answered request": GET + b"Content-Length: 100000\r\n\r\n",
    }
    more = {"a trickling head": b"a", "a trickling body": b" ", "trickling chunks": b"1\r\n \r\n"}
    found, end = dict.fromkeys(begun, b""), time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        open_ones = {stack.enter_context(guarded.connect()): name for name in begun}
        for connection, name in open_ones.items():
            connection.sendall(begun[name])
        while open_ones and time.monotonic() < end:
            for connection in select.select(list(open_ones), [], [], 0.05)[0]:
                part = b""
                with contextlib.suppress(ConnectionError):
                    part = connection.recv(65536)
                found[open_ones[connection]] += part
                if not part:
                    del open_ones[connection]
            for connection, name in open_ones.items():
                with contextlib.suppress(ConnectionError):
                    connection.sendall(more.get(name, b""))
        assert not open_ones, f"still waited for: {list(open_ones.values())}"
    assert found.pop("idle") == b""
    assert found.pop("an answered request").startswith(b"HTTP/1.1 200 ")
    for name, answer in found.items():
        assert answer.startswith(b"HTTP/1.1 408 "), name
        assert f"the {'head' if 'head' in name else 'body'} of the request" in answer.decode()


def test_bodies_that_are_not_finished_have_a_size_together(guarded):
    begun = POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % MAX_BODY
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(guarded.connect()) for _ in range(3)]
        for connection in connections:
            connection.sendall(begun + b" " * (MAX_BODY - 1))
        ready, _, _ = select.select(connections, [], [], PATIENCE)
        assert is_served(guarded), "a small body is always heard"
        answers = [read_answer(connection) for connection in ready[:1]]
    assert [status for status, _, _ in answers] == [503]
    assert answers[0][1]["retry-after"] == "1"
    assert "the bodies of all requests" in answers[0][2]
    wait_for(lambda: fits(guarded, begun))


def fits(server, begun):
    """Whether a large body is taken again."""
    with server.connect() as connection:
        connection.sendall(begun + b" " * MAX_BODY)
        return read_answer(connection)[0] == 400  # no JSON, but all of it was read


def test_idle_connections_make_room(guarded):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(guarded.connect()) for _ in range(3 * NUM_CONNECTIONS)]
        wait_for(lambda: is_served(guarded))
        idle[0].settimeout(PATIENCE)
        assert rest_of(idle[0]) == b""


def test_where_all_connections_are_in_use_one_more_is_told_so_and_health_is_good(guarded):
    watching = b"GET /trace HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def one_more():
            connection = stack.enter_context(guarded.connect())
            connection.sendall(watching)
            return rest_of(connection) if not is_open(connection) else b""

        def is_open(connection):
            return connection.recv(15, socket.MSG_PEEK).startswith(b"HTTP/1.1 200 ")

        for _ in range(8):
            wait_for(lambda: not one_more())
        for _ in range(2 * MAX_WITHOUT_PLACE):  # idle ones do not keep a probe out
            stack.enter_context(guarded.connect())
        assert guarded.fetch("GET", "/health", Connection="keep-alive") == (200, {"status": "ok"})
        for request in (watching, http_request("POST", "/tokenize", {"prompt": "a"})):
            with guarded.connect() as last:
                last.sendall(request)
                assert rest_of(last)[:13] == b"HTTP/1.1 503 "
    wait_for(lambda: is_served(guarded))


def test_a_request_before_the_answer_to_the_last_ends_the_connection(guarded):
    with guarded.connect() as connection:
        connection.sendall((GET + b"\r\n") * 1000)
        answer = rest_of(connection)
    assert (answer.count(b"HTTP/1.1"), answer[:13]) == (1, b"HTTP/1.1 200 ")


def test_what_is_no_http_is_told_so(guarded):
    with guarded.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("host", "status"),
    [(host, 200) for host in ("LOCALHOST.:8000", "[::1]:8000", "models.example:8000")]
    + [(host, 421) for host in ("evil.example", "localhost.evil.example", "10.0.0.1", "[", "")],
)
def test_whoever_asks_for_another_host_is_refused(guarded, host, status):
    for method, path in (("GET", "/health"), ("GET", "/"), ("POST", "/tokenize")):
        found, answer = guarded.fetch(method, path, {"prompt": "a"}, Host=host)
        assert found == status
        if status == 421:
            assert answer["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts" in answer["error"]["message"]


def test_a_storm_of_hostile_clients(guarded):
    """Whatever comes, in whatever order: somebody else is served afterwards."""
    rng = random.Random(os.urandom(8) if os.environ.get("STORM") == "1" else 3)
    requests = [
        POST + b"Content-Length: 15\r\n\r\n" + b'{"prompt": "a"}',
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n     \r\n0\r\nX: a\r\n\r\n",
        GET + b"X: " + b"a" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n",
        GET.replace(b"localhost", b"evil.example") + b"\r\n",
        (GET + b"\r\n") * 50,
        POST + b"Content-Length: %d\r\n\r\n" % MAX_BODY + b" " * MAX_BODY,
        POST + b"Content-Length: %d\r\n\r\n" % (MAX_BODY + 1),
        b"GET /trace HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\r\n" * 1000,
    ]
    for _ in range(100 if os.environ.get("STORM") == "1" else 3):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                data = bytearray(rng.choice(requests))
                for _ in range(rng.choice([0, 0, 1, 20])):
                    data[rng.randrange(min(len(data), 200))] = rng.randrange(256)
                cut = rng.choice([len(data), rng.randrange(len(data) + 1)])
                connection = stack.enter_context(guarded.connect())
                with contextlib.suppress(OSError):
                    connection.sendall(data[:cut])
                    if rng.random() < 0.3:
                        connection.close()
                    elif rng.random() < 0.3:
                        connection.settimeout(0.01)
                        connection.recv(65536)
            wait_for(lambda: is_served(guarded))
    wait_for(lambda: is_served(guarded))
