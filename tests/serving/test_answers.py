"""Answers with log-probabilities: large ones let others have their turn."""

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from helpers.servers import async_engine
from m3_paged import SamplingParams
from milestone_llm.core.outputs import EngineCoreOutput, Logprob, RequestFacts
from milestone_llm.serving.api.protocol import CompletionRequest
from milestone_llm.serving.api.response_bodies import ResponseBodies
from milestone_llm.serving.api.responses import ApiResponse
from milestone_llm.serving.engine.client import EngineCoreOutputs, EngineRequest

NUM_CHOICES = 3


class Tokenizer:
    """For which every token is an é."""

    def convert_ids_to_tokens(self, token_id):
        return "é"

    def decode(self, token_ids, **options):
        return "é" * len(token_ids)


@pytest.fixture
def tokenizing():
    """A pool of one thread."""
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        yield pool


def answered(params, is_stream, tokenizing):
    """What a client is sent, in parts, and the threads in which tokens were decoded."""
    threads, parts = set(), []

    def decode(token_id):
        threads.add(threading.current_thread().name)
        return chr(token_id)

    async def send(message):
        parts.append(message.get("body", b""))

    async def receive():
        await asyncio.Event().wait()

    async def run():
        engine = async_engine(Tokenizer())
        request = engine.open_request(NUM_CHOICES)
        request.start([EngineRequest("r", [65, 66], params)], is_stream, None)
        entry = {67: Logprob(-0.5, 1), 68: Logprob(-math.inf, 2)}
        logprobs = [entry] if params.logprobs else []
        message = EngineCoreOutputs()
        of_prompt = RequestFacts(prompt_logprobs=[None, {66: Logprob(-0.5, 1)}])
        for name, facts in (("r", of_prompt), ("r/1", None), ("r/2", None)):
            message.add(EngineCoreOutput(name, [67], logprobs, "length", facts))
        engine.deliver(message)
        body = CompletionRequest(prompt=[65, 66])
        bodies = ResponseBodies(request, "r", "m", body, ["AB"] * 3, decode, str.encode)
        await ApiResponse(request, bodies, is_stream, tokenizing)({"type": "http"}, receive, send)

    asyncio.run(run())
    return b"".join(parts), threads


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_are_decoded_where_the_tokenizer_is_used_anyway(is_stream, tokenizing):
    """Not in the event loop: it would stand still, and a tokenizer is not made for two threads."""
    params = SamplingParams(n=NUM_CHOICES, logprobs=1, prompt_logprobs=0)
    answer, threads = answered(params, is_stream, tokenizing)
    assert threads == {"tokenizer_0"}
    assert answer.count(b'"tokens":["A","B","C"]') == NUM_CHOICES
    assert b"Infinity" not in answer, "which is no JSON"


def test_between_two_choices_others_have_their_turn(tokenizing):
    params = SamplingParams(n=NUM_CHOICES, logprobs=1, prompt_logprobs=0)
    jobs = []
    pool = SimpleNamespace(submit=lambda *job: jobs.append(job) or tokenizing.submit(*job))
    answer, _ = answered(params, False, pool)
    assert len(jobs) > NUM_CHOICES
    choices = json.loads(answer)["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -0.5, -0.5]] * 3
