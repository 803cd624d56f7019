"""Outputs on their way: the newest of each request, to whom it belongs, once."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest

from helpers.engines import as_text, word_tokenizer
from helpers.interrupter import Interrupter
from m1_single import RequestOutput, SamplingParams
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.frontend import output_processor
from milestone_llm.frontend.output_processor import OutputProcessor, OutputQueue


class Following:
    """An output processor that follows one request, of a prompt that does not matter."""

    def __init__(self, name: str = "a", wants_all: bool = True, **params: Any) -> None:
        self.name = name
        self.processor, self.queue = OutputProcessor(word_tokenizer()), OutputQueue(wants_all)
        params = {"max_tokens": 9, **params}
        self.state = self.processor.add([name], [3], SamplingParams(**params), self.queue)

    def process(self, *token_ids: int, reason: str | None = None) -> dict[str, str]:
        """What ends with these tokens."""
        return self.processor.process([EngineCoreOutput(self.name, [*token_ids], [], reason)])


# --- one reader's queue -------------------------------------------------------------------------


def output_of(name: str, num_tokens: int = 0) -> RequestOutput:
    following = Following(name)
    following.process(*[5] * num_tokens)
    return following.state.snapshot()


def test_the_newest_output_of_a_request_replaces_the_ones_before():
    queue = OutputQueue()
    for num_tokens in (1, 2):
        for name in "ab":
            queue.put(output_of(name, num_tokens))
    assert [(o.request_id, len(o.token_ids)) for o in queue.take()] == [("a", 2), ("b", 2)]
    assert (queue.take(), len(queue)) == ([], 0)


def test_no_output_is_lost_where_taking_is_interrupted():
    for at in itertools.count(1):
        queue = OutputQueue()
        for name in "ab":
            queue.put(output_of(name))
        interrupter, taken = Interrupter(at), []
        with contextlib.suppress(KeyboardInterrupt), interrupter:
            taken = queue.take()
        if not interrupter.where:
            break
        assert [each.request_id for each in taken + queue.take()] == ["a", "b"], interrupter.where
    assert at > 3


# --- from tokens to outputs ---------------------------------------------------------------------


def test_an_early_output_keeps_the_tokens_and_times_that_it_had():
    following = Following()
    following.process(5)
    (early,) = following.queue.take()
    assert following.process(6, 7, reason="length") == {"a": "length"}
    (last,) = following.queue.take()
    assert (len(early.metrics.token_times), early.metrics.finish_time) == (1, None)
    assert (early.token_ids, early.text) == ([5], "w5")
    assert (last.token_ids, last.text) == ([5, 6, 7], as_text([5, 6, 7]))
    assert len(last.metrics.token_times) == 3
    assert last.metrics.finish_time is not None


def test_text_that_nobody_sees_grow_is_made_at_the_end_at_once(monkeypatch):
    calls, decode = [], output_processor.decode_whole
    monkeypatch.setattr(output_processor, "Detokenizer", None)  # nothing is made token by token
    monkeypatch.setattr(
        output_processor, "decode_whole", lambda *given: calls.append(given) or decode(*given)
    )
    following = Following(wants_all=False)
    for token_id in range(5, 10):
        following.process(token_id)
    following.process(reason="length")
    assert (len(following.queue), calls) == (0, [])
    assert following.state.snapshot().text == as_text(range(5, 10))
    assert len(calls) == 1


@pytest.mark.parametrize("reason", [None, "length"])
def test_a_stop_string_is_the_reason_however_far_the_core_has_come(reason):
    """Two steps may be settled before their outputs are processed."""
    following = Following(stop="w7", ignore_eos=True)
    assert following.process(5) == {}
    outputs = [EngineCoreOutput("a", [6, 7, 8]), EngineCoreOutput("a", [9], [], reason)]
    assert following.processor.process(outputs) == {"a": "stop"}
    (output,) = following.queue.take()
    assert (output.token_ids, output.text.strip()) == ([5, 6, 7], as_text([5, 6]))
    assert output.finish_reason == "stop"
    assert following.process(9) == {}, "it is gone"
    assert following.queue.take() == []


def test_after_an_interruption_the_processor_says_what_it_has_and_takes_the_rest(monkeypatch):
    following = Following(stop="w7")
    following.process(5)
    (completion,) = following.state.completions
    completion.token_times.append(0.0)  # of a token that was being taken in
    completion._detokenizer.append(6, False)
    for _ in range(2):
        assert following.processor.repair() == {"a": 1}

    def interrupted(reason: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(completion, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):  # the stop string was found
            following.process(6, 7)
    assert following.processor.repair() == {"a": 3}
    assert following.process() == {"a": "stop"}
    (output,) = following.queue.take()
    assert (output.token_ids, output.text.strip()) == ([5, 6, 7], as_text([5, 6]))
    assert len(output.metrics.token_times) == 3
    assert following.processor.repair() == {}


def test_the_token_that_ends_an_output_is_in_no_text_after_an_interruption(monkeypatch):
    following = Following()
    following.process(5)
    (completion,) = following.state.completions

    def interrupted(reason: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(completion, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            following.process(6, 7, reason="stop")
    assert following.processor.repair() == {"a": 3}
    following.process(reason="stop")
    output = following.state.snapshot()
    assert (output.token_ids, output.text.strip()) == ([5, 6, 7], as_text([5, 6]))
