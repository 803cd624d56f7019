"""The page at `/` is fed with the steps that the server makes, and only while it watches."""

from __future__ import annotations

import json

from helpers.servers import http_request, read_answer, wait_for

PROMPT = "hello"


def watch(server, **headers):
    """A connection that has asked for the steps, past the head of the answer, and what came."""
    connection = server.connect()
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(f"GET /trace HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode())
    return connection


def records_of(connection, until) -> list[dict]:
    """Records from a chunked answer of JSON lines, until there are enough."""
    text = ""
    while True:
        text += connection.recv(65536).decode()
        whole = text.split("\n")[:-1]
        lines = [line for line in whole if line.startswith("{") and line.endswith("}")]
        records = [json.loads(line) for line in lines]
        if until(records):
            return records


def test_steps_come_as_they_happen_with_the_text_of_tokens(server) -> None:
    server.wait_until_idle()  # others' requests have no part in it
    with watch(server) as connection:
        assert b"200 OK" in connection.recv(15)
        reply = server.client().completions.create(
            model=server.model, prompt=PROMPT, max_tokens=5, temperature=0, extra_body={
                "ignore_eos": True
            }
        )  # fmt: skip
        records = records_of(connection, lambda found: any(each["finished"] for each in found))
    first = next(each for each in records if each["batch"])
    assert first["num_prefill_tokens"] == len(PROMPT)
    rows = [row for each in records for row in each["batch"]]
    sampled = [row["sampled_token"] for row in rows if row["sampled_token"] is not None]
    assert len(sampled) == 5
    assert {row["request_id"] for row in rows} == {reply.id}
    assert [each["beginnings"] for each in records if "beginnings" in each] == [{reply.id: PROMPT}]
    assert set(map(str, sampled)) == {name for each in records for name in each.get("texts", {})}


def test_too_many_readers_are_turned_away_and_their_places_come_free(m4) -> None:
    def status_of_one_more():
        connection = watch(m4)
        answer = connection.recv(15)
        return connection, int(answer.split()[1])

    readers = []
    while (last := status_of_one_more())[1] == 200:
        readers.append(last[0])
        assert len(readers) <= 8
    assert last[1] == 429
    for connection in (*readers, last[0]):
        connection.close()
    connection, _ = wait_for(lambda: (found := status_of_one_more())[1] == 200 and found)
    connection.close()


def test_the_page_and_its_steps_come_with_the_policy_of_the_page(m4) -> None:
    with m4.connect() as connection:
        connection.sendall(http_request("GET", "/"))
        _, headers, page = read_answer(connection)
    policy = headers["content-security-policy"]
    within, _, framing = policy.rpartition("; ")
    assert f'content="{within}"' in page
    assert '"/trace"' in page
    assert framing == "frame-ancestors 'none'"
    with watch(m4) as connection:
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
    assert f"content-security-policy: {policy}" in head.decode()
