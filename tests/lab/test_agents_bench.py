"""The bench of agents: what a turn counts, and what it does when it is refused."""

import argparse
import asyncio
import json

import pytest

from milestone_llm.lab.bench.agents import TOKEN_ID, Turn, figures_of, run_agents
from milestone_llm.serving import timed

REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 0\r\n\r\n"
USAGE = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 16}}
ANSWER = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(
    b"data: " + json.dumps(event).encode() + b"\n\n"
    for event in ({"choices": [{"text": "a"}]}, {"choices": [], "usage": USAGE})
)


def test_agents_repeat_their_conversation_and_come_back_when_refused():
    seen = []

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        seen.append((head.partition("Bearer ")[2].split()[0], body["prompt"]))
        writer.write(REFUSED if len(seen) == 1 else ANSWER)
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        args = argparse.Namespace(
            seed=0, prefix_len=8, turns=2, think=0.0, result_len=3, answer_len=2
        )
        async with server:
            return await run_agents(f"http://127.0.0.1:{port}", ["light0"], args)

    (_, first), (_, second) = asyncio.run(run())
    assert [key for key, _ in seen] == ["light0"] * 3
    (_, refused), (_, prompt), (_, longer) = seen
    assert refused == prompt
    assert timed.TOKEN_ID == TOKEN_ID
    assert longer[: len(prompt) + 2] == [*prompt, TOKEN_ID, TOKEN_ID]
    assert len(longer) == len(prompt) + 2 + 3
    assert (first.num_refusals, first.is_first) == (1, True)
    assert (second.num_refusals, second.is_first, second.num_cached_tokens) == (0, False, 16)


def test_figures_of_known_turns():
    turns = [Turn(True, 2.0, 10, 0), Turn(False, 0.5, 30, 20, 3)]
    assert dict(figures_of(turns)) == pytest.approx(
        {
            "refused": 3,
            "prompt_tokens": 40,
            "computed_tokens": 20,
            **{"first_p50": 2000, "first_p95": 2000, "later_p50": 500, "later_p95": 500},
        }
    )
