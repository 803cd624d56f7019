"""A stream's pieces: characters whole, stop strings held back, several tokens in one frame."""

import asyncio

import pytest

from m3_paged import SamplingParams
from milestone_llm.serving import engine_loop
from milestone_llm.serving.desk import Desk
from milestone_llm.serving.engine_client import EngineRequest, Piece, Progress
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


def run_with_desk(play, num_choices=1):
    """Run `play(desk, call)` with a call of one request; orders to the engine are a list."""

    class Orders(list):
        def submit(self, requests):
            self += [("submit", request.request_id) for request in requests]

        def abort(self, request_id):
            self.append(("abort", request_id))

        def want_more(self):
            self.append("want more")

    async def run():
        desk = Desk(Orders(), Metrics("tiny"), max_choices=4)
        desk.event_loop = asyncio.get_running_loop()
        call = desk.open_call(num_choices)
        params = SamplingParams(max_tokens=9, n=num_choices)
        call.submit([EngineRequest("r", [1], params, is_streamed=True)], None)
        return await play(desk, call)

    return asyncio.run(run())


def progress(text, finish_reason=None, index=0):
    return Progress("r", [Piece(index, text, [len(text)], [], finish_reason)])


def test_tokens_that_nobody_has_fetched_go_out_together():
    async def play(desk, call):
        for text in ("a", "bb", "ccc"):
            desk.deliver([progress(text)])
        (piece,) = await call.pieces()
        assert (piece.text, piece.token_ids) == ("abbccc", [1, 2, 3])
        desk.deliver([progress("d", "stop")])
        (piece,) = await call.pieces()
        assert (piece.text, piece.finish_reason) == ("d", "stop")
        assert await call.pieces() == []
        call.close()
        return [order for order in desk.engine if order != "want more"]

    assert run_with_desk(play) == [("submit", "r")], "what is whole is not aborted"


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
    loop.submit([*requests, EngineRequest("whole", [3, 4], params)])
    loop.run(deliver)
    sizes = [
        {each.request_id: len(each.pieces[0].token_ids) for each in batch} for batch in batches
    ]
    assert sizes == [{"r": 1}, {"r": 3}, {"r": 2, "whole": 6}]


def test_the_engine_does_not_tell_news_all_the_time(oracle, monkeypatch):
    batches = []

    def deliver(batch):
        batches.append(batch)
        loop.want_more()  # at once, as if handing out cost nothing
        if not oracle.has_unfinished_requests():
            loop.stop()

    monkeypatch.setattr(engine_loop, "PACE", 1e9)
    monkeypatch.setattr(engine_loop, "MAX_PAUSE", 1e9)
    loop = EngineLoop(oracle)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    loop.submit([EngineRequest("r", [3, 4], params, is_streamed=True)])
    loop.run(deliver)
    sizes = [len(each.pieces[0].token_ids) for batch in batches for each in batch]
    assert sizes == [1, 5], "what is left comes when the engine is idle"


def test_http_asks_for_more_once_it_has_handed_out_what_came():
    async def play(desk, call):
        desk.deliver([progress("a")])
        assert "want more" not in desk.engine
        await call.pieces()
        while "want more" not in desk.engine:
            await asyncio.sleep(0)
        return desk.engine.count("want more")

    assert run_with_desk(play) == 1


def test_http_is_woken_once_for_all_that_waits():
    async def play(desk, call):
        wake_ups = []
        soon = desk.event_loop.call_soon_threadsafe

        class Loop:
            call_soon_threadsafe = staticmethod(lambda f: (wake_ups.append(f), soon(f)))
            call_soon = staticmethod(desk.event_loop.call_soon)
            call_later = staticmethod(desk.event_loop.call_later)

        desk.event_loop = Loop
        for _ in range(5):
            desk.deliver([progress("a")])
        await call.pieces()
        return len(wake_ups)

    assert run_with_desk(play) == 1


def test_what_is_closed_unfinished_is_aborted_and_leaves_its_place():
    async def play(desk, call):
        with pytest.raises(Exception, match="4 at a time"):
            desk.check(3)
        call.close()
        call.close()
        desk.check(4)
        desk.deliver([progress("late")])
        await asyncio.sleep(0)
        return [order for order in desk.engine if order != "want more"]

    assert run_with_desk(play, num_choices=2) == [("submit", "r"), ("abort", "r")]
