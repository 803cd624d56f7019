"""What a stream brings: characters whole, stop strings held back, several tokens in one event."""

import asyncio

import pytest

from m3_paged import SamplingParams
from milestone_llm.serving import engine_loop
from milestone_llm.serving.async_engine import AsyncEngine
from milestone_llm.serving.engine_client import CompletionDelta, EngineRequest, RequestDelta
from milestone_llm.serving.engine_loop import EngineLoop
from milestone_llm.serving.metrics import Metrics


def stream(server, **body):
    return [
        event.choices[0]
        for event in server.client().completions.create(model=server.model, stream=True, **body)
    ]


def test_a_character_of_two_tokens_comes_whole(m4, oracle):
    body = {"prompt": "Hello", "seed": 3, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
    texts = [choice.text for choice in stream(m4, **body)]
    params = SamplingParams(seed=3, max_tokens=120, ignore_eos=True)
    whole = oracle.generate(["Hello"], params)[0].text
    assert "".join(texts) == whole
    two_tokens = [character for character in whole if "\x80" <= character < "\u0800"]
    assert len(two_tokens) > 5, "the model says such characters"


def test_a_stop_string_is_held_back_and_the_first_to_complete_wins(m4, oracle):
    whole = oracle.generate(["Hello"], SamplingParams(temperature=0, max_tokens=24))[0].text
    first, second = whole[8:11], whole[9:12]
    assert whole.find(first) == 8
    texts = stream(m4, prompt="Hello", temperature=0, max_tokens=24, stop=[second, first])
    assert "".join(choice.text for choice in texts) == whole[:8]
    assert texts[-1].finish_reason == "stop"


def with_one_request(play, num_choices=1):
    """Run `play(engine, request)` with an open request; what the client is told is a list."""

    class Commands(list):
        def add_requests(self, requests):
            self += [("add", request.request_id) for request in requests]

        def abort(self, request_id):
            self.append(("abort", request_id))

        def want_more(self):
            self.append("want more")

    async def run():
        engine = AsyncEngine(Commands(), Metrics("tiny"), max_choices=4)
        engine.event_loop = asyncio.get_running_loop()
        request = engine.open_request(num_choices)
        params = SamplingParams(max_tokens=9, n=num_choices)
        request.start([EngineRequest("r", [1], params, is_streamed=True)], None)
        return await play(engine, request)

    return asyncio.run(run())


def delta_of(text, finish_reason=None, index=0):
    return RequestDelta("r", [CompletionDelta(index, text, [len(text)], [], finish_reason)])


def test_tokens_that_nobody_has_fetched_go_out_together():
    async def play(engine, request):
        for text in ("a", "bb", "ccc"):
            engine.deliver([delta_of(text)])
        (delta,) = await request.deltas()
        assert (delta.text, delta.token_ids) == ("abbccc", [1, 2, 3])
        engine.deliver([delta_of("d", "stop")])
        (delta,) = await request.deltas()
        assert (delta.text, delta.finish_reason) == ("d", "stop")
        assert await request.deltas() == []
        request.close()
        return [command for command in engine.client if command != "want more"]

    assert with_one_request(play) == [("add", "r")], "what is finished is not aborted"


def test_what_comes_before_http_wants_it_goes_out_together(oracle, monkeypatch):
    batches, step, num_steps = [], oracle.step, 0

    def counted_step():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            loop.want_more()
        return step()

    def deliver(batch):
        batches.append(batch)
        if not oracle.has_unfinished_requests():
            loop.stop()

    monkeypatch.setattr(oracle, "step", counted_step)
    monkeypatch.setattr(engine_loop, "PACE", 1.0)  # as soon as it is wanted
    loop = EngineLoop(oracle)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [EngineRequest("r", [3, 4], params, is_streamed=True)]
    loop.add_requests([*requests, EngineRequest("whole", [3, 4], params)])
    loop.run(deliver)
    sizes = [
        {each.request_id: len(each.completions[0].token_ids) for each in batch} for batch in batches
    ]
    assert sizes == [{"r": 1}, {"r": 3}, {"r": 2, "whole": 6}]


def test_the_engine_does_not_send_all_the_time(oracle, monkeypatch):
    batches = []

    def deliver(batch):
        batches.append(batch)
        loop.want_more()  # at once, as if passing on cost nothing
        if not oracle.has_unfinished_requests():
            loop.stop()

    monkeypatch.setattr(engine_loop, "PACE", 1e9)
    monkeypatch.setattr(engine_loop, "MAX_PAUSE", 1e9)
    loop = EngineLoop(oracle)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    loop.add_requests([EngineRequest("r", [3, 4], params, is_streamed=True)])
    loop.run(deliver)
    sizes = [len(each.completions[0].token_ids) for batch in batches for each in batch]
    assert sizes == [1, 5], "what is left comes when the engine is idle"


def test_http_asks_for_more_once_it_has_passed_on_what_came():
    async def play(engine, request):
        engine.deliver([delta_of("a")])
        assert "want more" not in engine.client
        await request.deltas()
        while "want more" not in engine.client:
            await asyncio.sleep(0)
        return engine.client.count("want more")

    assert with_one_request(play) == 1


def test_what_is_closed_unfinished_is_aborted_and_leaves_its_room():
    async def play(engine, request):
        with pytest.raises(Exception, match="4 at a time"):
            engine.check_room(3)
        request.close()
        request.close()
        engine.check_room(4)
        engine.deliver([delta_of("late")])
        await asyncio.sleep(0)
        return [command for command in engine.client if command != "want more"]

    assert with_one_request(play, num_choices=2) == [("add", "r"), ("abort", "r")]
