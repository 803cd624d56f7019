"""Nothing that a client sends harms another, and each is told what was wrong."""

import contextlib
import json
import os
import random
import select
import socket
import time

import pytest

from milestone_llm.serving.connections.admission import AllowedHosts, ApiError
from milestone_llm.serving.connections.connection import MAX_HEAD_BYTES, MAX_WITHOUT_PLACE
from serving_helpers import PATIENCE, http_request, read_answer, serve, wait_for

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


def chat_with(content, **variables):
    message = {"role": "user", "content": content}
    return {"messages": [message], "chat_template_kwargs": variables}


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (COMPLETIONS, b"{", "no valid JSON", None),
        (COMPLETIONS, b"", "", None),
        (COMPLETIONS, b"\xff\xfe", "", None),
        (COMPLETIONS, [], "valid dictionary", None),
        (COMPLETIONS, {}, "prompt: Field required", "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt: it must be text, token ids", "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt: it must be text, token ids", "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop": ["b", 1]}, "stop: it must be text or a", "stop"),
        (COMPLETIONS, {"prompt": []}, "prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [[5], []]}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [5000]}, "token id 5000", None),
        (COMPLETIONS, {"prompt": "a" * 300}, "300 tokens, but max_model_len=256", "prompt"),
        (COMPLETIONS, {"prompt": "a" * 10**6}, "1,000,000 characters, but", "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "at least 1", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature must be", "temperature"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "no NaN", None),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', "half of a surrogate pair", None),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed", "seed"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n: ", "n"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop must be", "stop"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "less than or equal to 20", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "guided_json": {}}, "is not supported", "guided_json"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream=true", "stream_options"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix is not supported", "suffix"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of is not supported", "best_of"),
        (COMPLETIONS, {"prompt": [10**6], "echo": True}, "token ids", "prompt"),
        (CHATS, {"messages": []}, "messages", "messages"),
        (CHATS, {"messages": HELLO, "tools": [{}]}, "tools.0.type", "tools"),
        (CHATS, {"messages": HELLO, "logit_bias": {"a": 1}}, "'a' is no token", "logit_bias"),
        (CHATS, {"messages": HELLO, "logit_bias": {"5": "1"}}, "valid number", "logit_bias"),
        (CHATS, {"messages": HELLO, "logit_bias": {"5": 101}}, "[-100, 100]", "logit_bias"),
        (CHATS, {"messages": HELLO, "logit_bias": {"5000": 1}}, "logit_bias holds", None),
        (CHATS, {"messages": HELLO, "logit_bias": [5]}, "dictionary", "logit_bias"),
        (CHATS, {"messages": HELLO, "presence_penalty": 3}, "[-2, 2]", "presence_penalty"),
        (CHATS, chat_with("a", opening="a" * 10**4), "10,0", "messages"),
        (CHATS, chat_with("a", tokenize=False), "tokenize is an option", "chat_template_kwargs"),
        (CHATS, {"messages": HELLO, "top_logprobs": 3}, "needs logprobs", "top_logprobs"),
        (CHATS, {"messages": HELLO, "top_logprobs": 21}, "or equal to 20", "top_logprobs"),
        (CHATS, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate pair", None),
        (CHATS, chat_with(None), "messages.0: a message of role user needs", "messages"),
        (CHATS, {"messages": [*HELLO, {"role": "tool"}]}, "messages.1: a message of", "messages"),
        (CHATS, chat_with({}), "messages.0.content: it must be text or a list of", "messages"),
        (CHATS, chat_with([{"type": "text", "text": 5}]), "content: it must be text", "messages"),
        (CHATS, {"messages": IMAGE}, "image_url are not supported", "messages"),
        (
            CHATS,
            {"messages": HELLO, "modalities": ["audio"]},
            "modalities is not supported",
            "modalities",
        ),
        ("/detokenize", {"tokens": [-1]}, "token ids", "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "token ids", "tokens"),
        ("/tokenize", {}, "either prompt or messages", "prompt"),
    ],
)
def test_what_is_wrong_is_said_in_openais_words(m4, path, body, message, param):
    status, answer = m4.fetch("POST", path, body)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


def test_what_asks_for_nothing_and_what_nobody_knows_is_ignored(m4):
    body = {"messages": HELLO, "max_tokens": 1, "tools": [], "response_format": {"type": "text"}}
    body |= {"frequency_penalty": 0.0, "logit_bias": None, "no_such_field": 1, "user": "me"}
    assert m4.fetch("POST", CHATS, body)[0] == 200


@pytest.mark.parametrize("role", ["system", "developer", "tool", "of a fine-tuned model"])
def test_a_role_is_for_the_chat_template_to_refuse(m4, role):
    messages = [*HELLO, {"role": "assistant", "content": None}, {"role": role, "content": "a"}]
    assert m4.fetch("POST", CHATS, {"messages": messages, "max_tokens": 1})[0] == 200


def test_other_models_other_paths_other_methods(m4):
    status, answer = m4.fetch("POST", COMPLETIONS, {"prompt": "a", "model": "gpt-5"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'tiny-bytes'" in answer["error"]["message"]
    status, answer = m4.fetch("POST", "/v1/responses", {})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    for path in ("/v1/responses", "/v1/chat/completions"):
        assert path in answer["error"]["message"]
    assert m4.fetch("GET", COMPLETIONS)[0] == 405
    with m4.connect() as probe:
        probe.sendall(http_request("HEAD", "/health"))
        status, _, body = read_answer(probe)
        assert (status, body) == (200, "")


def test_half_a_request(m4):
    whole = http_request("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    for end in (10, 60, len(whole) - 3):
        with m4.connect() as connection:
            connection.sendall(whole[:end])
    with m4.connect() as slow_writer:
        slow_writer.sendall(whole[:-3])
        assert m4.fetch("POST", COMPLETIONS, {"prompt": "a"})[0] == 200, "others do not wait"
        slow_writer.sendall(whole[-3:])
        assert read_answer(slow_writer)[0] == 200
    m4.wait_until_idle()


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
SECONDS = 2.0
NUM_CONNECTIONS = 8
MAX_BODY, MAX_BODIES = 200_000, 200_000


@pytest.fixture(scope="module")
def guarded(model_folder, tmp_path_factory):
    """A server with little patience and little room."""
    limits = ["--request-seconds", str(SECONDS), str(SECONDS)]
    limits += ["--max-connections", str(NUM_CONNECTIONS), "--max-body-bytes", str(MAX_BODY)]
    limits += ["--max-bodies-bytes", str(MAX_BODIES), "--max-num-seqs", "2"]
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


def test_a_header_without_an_end(guarded):
    with guarded.connect() as connection:
        connection.sendall(GET + b"X: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(16 * 2**20 // MAX_HEAD_BYTES):
                connection.sendall(b"a" * MAX_HEAD_BYTES)
            pytest.fail("16 MiB were taken")
    assert is_served(guarded)


def test_a_head_has_a_size(guarded):
    with guarded.connect() as connection:
        connection.sendall(GET + b"X: " + b"a" * MAX_HEAD_BYTES)
        assert rest_of(connection).startswith(b"HTTP/1.1 431 ")
    with guarded.connect() as connection:
        connection.sendall(GET + b"X: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n")
        assert connection.recv(15).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("last", [b"0\r\nX: ", b"1;"], ids=["trailer", "chunk"])
def test_what_stands_beside_a_body_has_a_size(guarded, last):
    with guarded.connect() as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + last)
        with contextlib.suppress(ConnectionError):
            for _ in range(16 * 2**20 // MAX_HEAD_BYTES):
                connection.sendall(b"a" * MAX_HEAD_BYTES)
            pytest.fail("16 MiB were taken")


def test_a_whole_head_that_is_too_large_is_refused_in_words(guarded):
    with guarded.connect() as connection:
        connection.sendall(GET + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert "larger than 65536 bytes" in json.loads(body)["error"]["message"]


def test_one_deadline_for_the_head_and_one_for_the_body_however_it_trickles(guarded):
    begun = {
        "idle": b"",
        "half a head": GET,
        "a trickling head": GET + b"X: ",
        "half a body": POST + b"Content-Length: 100\r\n\r\n",
        "a trickling body": POST + b"Content-Length: 100000\r\n\r\n",
        "trickling chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n",
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
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("LOCALHOST.", 200)]
    + [(host, 421) for host in ("evil.example", "localhost.evil.example", "10.0.0.1", "[", "")],
)
def test_whoever_asks_for_another_host_is_refused(guarded, host, status):
    for method, path in (("GET", "/health"), ("GET", "/"), ("POST", "/tokenize")):
        found, answer = guarded.fetch(method, path, {"prompt": "a"}, Host=host)
        assert found == status
        if status == 421:
            assert answer["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts" in answer["error"]["message"]


def test_names_that_a_server_is_given():
    hosts = AllowedHosts(["Models.example"], takes_all=True)
    hosts.check("models.example:8000")
    hosts.check("localhost")
    with pytest.raises(ApiError, match=r"evil\.example"):
        hosts.check("evil.example")
    AllowedHosts([], takes_all=True).check("anything")


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
