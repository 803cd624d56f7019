"""What a stream brings: characters whole, stop strings held back, several tokens in one event."""

import asyncio
import contextlib
import json
import threading
import time

import pytest

from helpers.engines import word_tokenizer
from helpers.servers import PATIENCE, async_engine, messages_of, wait_for
from m3_paged import SamplingParams
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.frontend.detokenizer import Detokenizer
from milestone_llm.serving.api.async_engine import MAX_MESSAGES
from milestone_llm.serving.api.errors import ApiError
from milestone_llm.serving.api.metrics import ENDS
from milestone_llm.serving.api.protocol import CompletionRequest
from milestone_llm.serving.api.response_bodies import ResponseBodies
from milestone_llm.serving.api.responses_bodies import ResponsesBodies
from milestone_llm.serving.api.responses_request import ResponsesRequest
from milestone_llm.serving.api.token_texts import Vocabulary
from milestone_llm.serving.engine.client import (
    EngineCoreOutputs,
    EngineRequest,
    Refusal,
)


def with_one_request(play, n=1, deadline=None, num_tokens=9, seconds_before=0):
    """Run `play(engine, request)` with a stream of `n` completions, which arrived some seconds
    before it starts."""

    async def run():
        engine = async_engine(word_tokenizer())
        request = engine.open_request(n)
        params = SamplingParams(max_tokens=num_tokens, n=n, stop=["w7"])
        arrival_time = time.perf_counter() - seconds_before
        given = EngineRequest("r", [1], params, arrival_time=arrival_time)
        request.start([given], is_stream=True, deadline=deadline)
        return await play(engine, request)

    return asyncio.run(run())


def counted(metrics, name):
    """The value of a metric, or of a label."""
    lines = metrics.page(None).decode().splitlines()
    (value,) = [line.split()[-1] for line in lines if name in line and line[0] != "#"]
    return float(value)


def deliver(engine, *token_ids, completion="r", finish_reason=None, event_loop=None):
    message = EngineCoreOutputs()
    message.add(EngineCoreOutput(completion, list(token_ids), [], finish_reason))
    engine.deliver(event_loop or asyncio.get_running_loop(), message)


def test_an_echo_is_in_the_first_event_only():
    async def play(engine, request):
        body = CompletionRequest(prompt="w1", echo=True, stream=True)
        names = Vocabulary(word_tokenizer())
        bodies, texts = ResponseBodies(request, "r", "m", body, ["w1"], names), []
        for token_id in (3, 4, 5):
            deliver(engine, token_id, finish_reason="length" if token_id == 5 else None)
            event = bodies.events(await request.outputs()).removeprefix(b"data: ")
            texts.append(json.loads(event)["choices"][0]["text"])
        return texts

    assert with_one_request(play) == ["w1w3", " w4", " w5"]


def test_each_token_has_a_gap_though_several_come_of_one_step():
    async def play(engine, request):
        for token_ids in ([3], [4, 5, 6], [8]):
            deliver(engine, *token_ids)
        await request.outputs()
        return counted(engine.metrics, "inter_token_latency_seconds_count")

    assert with_one_request(play) == 4


def test_tokens_that_come_while_http_is_busy_go_out_together():
    async def play(engine, request):
        for token_id in (3, 4, 5):
            deliver(engine, token_id)
        (output,) = await request.outputs()
        assert output.token_ids == [3, 4, 5]
        deliver(engine, 6, finish_reason="length")
        (output,) = await request.outputs()
        assert (output.text, output.finish_reason) == ("w3 w4 w5 w6", "length")
        assert await request.outputs() == []
        request.close()
        return engine.client

    assert with_one_request(play) == [("add", "r")], "what is finished is not aborted"


@pytest.mark.parametrize("api", ["completions", "responses"])
def test_what_came_before_an_error_is_sent_though_both_are_taken_at_once(api):
    async def play(engine, request):
        deliver(engine, 3, 4)
        message = EngineCoreOutputs()
        message.add(EngineCoreOutput("r", [5], [], "error", failed_rule="Too many items"))
        engine.deliver(asyncio.get_running_loop(), message)
        if api == "completions":
            body = CompletionRequest(prompt="w1", stream=True)
            bodies = ResponseBodies(request, "r", "m", body, [""], Vocabulary(word_tokenizer()))
        else:
            bodies = ResponsesBodies(request, "r", "m", ResponsesRequest(input="w1"), None)
        events = bodies.events(await request.outputs())
        with pytest.raises(ApiError, match="Too many items"):
            await request.outputs()
        return events

    events = with_one_request(play)
    assert b'"w3 w4 w5"' in events
    assert b'finish_reason":"' not in events
    assert b"response.completed" not in events


@pytest.mark.parametrize("how", ["stop string", "no text", "refused"])
def test_what_the_client_gets_is_what_counts(how, monkeypatch):
    """The engine is further, and has ended the request for a reason of its own."""

    async def play(engine, request):
        if how == "refused":
            refusals = {"r": Refusal("no memory", 500)}
            engine.deliver(asyncio.get_running_loop(), EngineCoreOutputs(refusals=refusals))
        else:
            if how == "no text":
                monkeypatch.setattr(Detokenizer, "append", None)
            for token_id in (3, 4, 7):
                deliver(engine, token_id)
            deliver(engine, 8, finish_reason="length")
        with contextlib.suppress(ApiError):
            while await request.outputs():
                pass
        request.close()
        num_tokens = counted(engine.metrics, "generation_tokens_total")
        assert counted(engine.metrics, "request_generation_tokens_sum") in (0, num_tokens)
        ends = {end: counted(engine.metrics, f'finished_reason="{end}"') for end in ENDS}
        return num_tokens, {end: number for end, number in ends.items() if number}

    expected = (3, {"stop": 1}) if how == "stop string" else (0, {"error": 1})
    assert with_one_request(play) == expected


def test_others_have_their_turn_when_tokens_come_faster_than_they_are_taken(monkeypatch):
    """Or nobody would be served, nor the server be ended."""

    async def play(engine, request):
        processor, num_taken = engine._output_processor, 0
        process = processor.process

        def process_and_deliver(outputs):
            nonlocal num_taken
            for _ in outputs:
                num_taken += 1
                if num_taken < 100:
                    deliver(engine, 3)
            return process(outputs)

        monkeypatch.setattr(processor, "process", process_and_deliver)
        for _ in range(2):
            deliver(engine, 3)
        await asyncio.sleep(0)
        num_at_once = num_taken
        request.close()
        return num_at_once

    assert with_one_request(play) == 2


def test_steps_wait_for_http_when_it_falls_far_behind():
    """Or what it has not taken would grow for as long as it is too slow. No token is lost."""
    num_steps = 5 * MAX_MESSAGES

    async def play(engine, request):
        here = asyncio.get_running_loop()

        def step():
            for _ in range(num_steps):
                deliver(engine, 3, event_loop=here)

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

    with_one_request(play, num_tokens=1000)


def test_the_engine_is_told_once_of_a_stop_string_and_what_it_sent_meanwhile_is_dropped():
    async def play(engine, request):
        for token_id in (3, 7, 8):
            deliver(engine, token_id)
            await asyncio.sleep(0)
        deliver(engine, 9, completion="r/1", finish_reason="length")
        while not (outputs := await request.outputs())[0].finished:
            pass
        first, second = outputs[0].outputs
        assert (first.text, first.finish_reason) == ("w3 ", "stop")
        assert (second.text, second.finish_reason) == ("w9", "length")
        return engine.client

    assert with_one_request(play, n=2) == [("add", "r"), ("end", "r")]


def test_what_is_closed_unfinished_is_aborted_and_leaves_its_room():
    async def play(engine, request):
        with pytest.raises(Exception, match="4 at a time"):
            engine.check_room(3)
        request.close()
        request.close()
        engine.check_room(4)
        deliver(engine, 3)
        await asyncio.sleep(0)
        return engine.client

    assert with_one_request(play, n=2) == [("add", "r"), ("abort", "r")]


def test_nobody_is_let_in_while_the_engine_stands_still():
    """What waits for it would grow for as long as clients come and go."""

    async def play(engine, request):
        engine.client.problem = "the engine has given no sign of life"
        with pytest.raises(ApiError, match="no sign of life") as raised:
            engine.open_request(1)
        assert raised.value.status_code == 503
        engine.client.problem = None
        engine.open_request(1)

    with_one_request(play)


def test_a_refusal_reaches_a_request_whose_first_completion_has_ended():
    """As when a replica dies: a stop string has ended the one that has the request's own id."""

    async def play(engine, request):
        deliver(engine, 3, 7)
        await request.outputs()
        engine.deliver(
            asyncio.get_running_loop(),
            EngineCoreOutputs(refusals={"r": Refusal("it has died", 503)}),
        )
        with pytest.raises(ApiError, match="it has died"):
            await asyncio.wait_for(request.outputs(), 1)

    with_one_request(play, n=2)


def test_a_stream_has_what_came_before_its_deadline():
    async def play(engine, request):
        deliver(engine, 3)
        (output,) = await request.outputs()
        assert output.token_ids == [3]
        with pytest.raises(ApiError, match=r"the deadline of 0\.01 s has passed"):
            await asyncio.wait_for(request.outputs(), PATIENCE)

    with_one_request(play, deadline=0.01)


def test_a_deadline_counts_from_the_arrival():
    async def play(engine, request):
        with pytest.raises(ApiError, match="the deadline of 600 s has passed"):
            await asyncio.wait_for(request.outputs(), 20)

    with_one_request(play, deadline=600, seconds_before=601)


def test_the_core_has_no_row_of_a_stopped_completion_any_more(oracle):
    def note(loop, num_messages):
        if num_messages == 2:
            loop.end_completion("r")

    messages = messages_of(oracle, SamplingParams(max_tokens=4, ignore_eos=True, n=2), note)
    rows = [[output.request_id for output in message.outputs()] for message in messages]
    assert rows == [["r", "r/1"], ["r", "r/1"], ["r/1"], ["r/1"]]
