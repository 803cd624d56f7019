"""An output knows its prompt's text, which is made only if somebody asks."""

import pickle

import pytest

import m1_single
from engine_helpers import as_text, greedy, make_engine, word_tokenizer


@pytest.fixture
def engine():
    return make_engine(m1_single, tokenizer=word_tokenizer())


def test_the_text_of_a_prompt_is_there_for_text_and_for_token_ids(engine):
    (by_text,) = engine.generate("w7 w12", greedy(2))
    (by_ids,) = engine.generate([7, 12], greedy(2))
    assert by_text.prompt == by_ids.prompt == "w7 w12" == as_text([7, 12])
    assert "prompt='w7 w12'" in repr(by_text)
    (without,) = make_engine(m1_single).generate([7, 12], greedy(2))
    assert without.prompt is None


def test_nothing_is_decoded_until_somebody_asks_and_then_once(engine, monkeypatch):
    decoded, decode = [], engine.tokenizer.decode

    def note(token_ids, **options):
        decoded.append(list(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(engine.tokenizer, "decode", note)
    outputs = list(engine.stream([[7, 12]], greedy(3)))
    assert [7, 12] not in decoded
    assert {output.prompt for output in outputs} == {"w7 w12"}
    assert decoded.count([7, 12]) == 1


def test_an_output_that_was_pickled_shows_the_same(engine):
    for output in engine.stream(["w7 w12"], greedy(3, logprobs=2, prompt_logprobs=1)):
        copy = pickle.loads(pickle.dumps(output))
        assert copy == output
        assert repr(copy) == repr(output)
        assert (copy.logprobs, copy.prompt_logprobs) == (output.logprobs, output.prompt_logprobs)
        assert copy.finished == output.finished
    assert len(copy.token_ids) == 3
    assert copy.outputs != engine.generate("w7 w12", greedy(2, logprobs=2))[0].outputs
