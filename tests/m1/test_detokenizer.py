"""Incremental text must equal a full decode, grow only, and never show a stop string."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from helpers.engines import word_tokenizer
from milestone_llm.frontend.detokenizer import Detokenizer, decode_whole
from milestone_llm.serving.api.token_texts import TokenText, TokenTexts, Vocabulary

FAMILY = "👨‍👩‍👧‍👦"  # four emoji and three joiners: 25 bytes
LINES = [
    "The quick brown fox jumps over the lazy dog. And then?  Two spaces.\n",
    "你好，世界！大模型推理引擎的五个里程碑。",
    f"Emoji: 😀 🎉 {FAMILY} 🏳️‍🌈 end",
]
SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: every byte is a token, merges from a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(["<tool>"])  # added, but not special: stays in the text
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """T5's kind: words carry their leading space as ▁; the first space of a text goes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's kind: what is not in the vocabulary is spelt in byte tokens, newlines too."""
    pieces = ["<unk>", *BYTES, "▁", "a", "b", "▁a", "▁ab", "好", "�", "▁▁"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab, [("▁a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "byte-fallback": byte_fallback_tokenizer(),
    "slow": ByT5Tokenizer(),  # in Python; drops invalid bytes instead of writing U+FFFD
}


def full_decode(tokenizer: Any, token_ids: list[int], skips: bool = True) -> str:
    return tokenizer.decode(
        token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
    )


def stream(
    tokenizer: Any,
    token_ids: list[int],
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    **options: bool,
) -> tuple[list[str], int]:
    """The text after each token and after the flush; and how many tokens were taken."""
    detokenizer = Detokenizer(tokenizer, list(stop), **options)
    texts = []
    num_taken = 0
    for token_id in token_ids:
        num_taken += 1
        is_stopped = detokenizer.append(token_id, look_for_stop=num_taken > min_tokens)
        texts.append(detokenizer.text)
        if is_stopped:
            break
    detokenizer.flush()
    texts.append(detokenizer.text)
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    return texts, num_taken


def ids_of(tokenizer: Any, *pieces: str) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(list(pieces))
    assert None not in ids
    return ids


# --- the text is that of a full decode ----------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_tokens_decode_as_a_whole_does(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    # Some ids past the end, as models often have more than their tokenizer. (This slow one raises.)
    last_id = len(tokenizer) + 3 if tokenizer.is_fast else len(tokenizer) - 1
    token_ids = data.draw(st.lists(st.integers(0, last_id), max_size=40))
    for skips in (True, False):
        texts, _ = stream(tokenizer, token_ids, skip_special_tokens=skips)
        assert texts[-1] == full_decode(tokenizer, token_ids, skips)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_that_is_kept_ends_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(LINES[0], add_special_tokens=False)
    whole = full_decode(tokenizer, token_ids)
    stops = whole[9:12], whole[10:14]  # the first is complete before the second
    end = whole.index(stops[0]) + len(stops[0])
    texts, _ = stream(tokenizer, token_ids, stops, include_stop=True)
    assert texts[-1] == whole[:end]


class CountingTokenizer(PreTrainedTokenizerFast):
    num_decoded = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, **options)


@pytest.mark.parametrize(
    ("text", "byte"),
    [("plain words and 你好 ", None), ("\ufffd", None), (FAMILY, None), ("</s>", None),
     ("𓀀", 0), ("𓀀", -1)],
)  # fmt: skip
def test_each_token_is_decoded_a_few_times_only_and_babbled_bytes_are_shown(
    text: str, byte: int | None
) -> None:
    plain = TOKENIZERS["byte-level"]
    tokenizer = CountingTokenizer(tokenizer_object=plain.backend_tokenizer)
    token_ids = (
        plain.encode(text * 3000)[:3000] if byte is None else [plain.encode(text)[byte]] * 2000
    )
    texts, _ = stream(tokenizer, token_ids)
    assert texts[-1] == full_decode(plain, token_ids)
    if byte is not None:
        assert len(texts[-2]) > 1900, "what can no longer change is shown"
    assert tokenizer.num_decoded < (40 if byte is None else 120) * len(token_ids)


# --- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["fox", "ick br", " ", "dog. And then?  Two", "\n", "T"])
def test_text_is_cut_before_a_stop_string_however_tokens_fall(stop: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode(LINES[0])
    texts, num_taken = stream(tokenizer, token_ids, (stop,))
    assert texts[-1] == LINES[0].split(stop)[0]
    assert stop in full_decode(tokenizer, token_ids[:num_taken])
    assert stop not in full_decode(tokenizer, token_ids[: num_taken - 1])


@settings(max_examples=200, deadline=None)
@example("ab", ["aba", "ba"])
@given(
    st.text("ab你😀", max_size=25),
    st.lists(st.text("ab你😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_all_is_shown_but_half_characters_and_beginnings_of_stops(
    text: str, stops: list[str]
) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode(text)
    texts, _ = stream(tokenizer, token_ids, tuple(stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    cut = min(ends, default=len(text))  # the text up to the first complete stop string
    starts = [cut - len(stop) for stop in stops if ends and text[:cut].endswith(stop)]
    assert texts[-1] == text[: min(starts, default=cut)]
    for num_tokens, shown in enumerate(texts[:-1], start=1):
        known = full_decode(tokenizer, token_ids[:num_tokens]).rstrip("\ufffd")
        if not any(stop in known for stop in stops):
            beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
            assert (
                shown == known[: len(known) - max(len(b) for b in beginnings if known.endswith(b))]
            )


def test_the_stop_string_that_is_complete_first_counts() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("The quick brown fox")
    assert stream(tokenizer, token_ids, ("brown fox", "ow", "zzz"))[0][-1] == "The quick br"
    assert stream(word_tokenizer(), [12], ("w12", "1"))[0][-1] == "w"  # both of one token


def test_a_stop_string_within_min_tokens_is_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = ids_of(tokenizer, *"abXYcdXYef")
    texts, num_taken = stream(tokenizer, token_ids, ("XY",), min_tokens=4)
    assert (texts[-1], num_taken) == ("abXYcd", 8)
    assert texts[3] == "abXY", "the ignored one is shown"
    # One that begins there and is completed later does stop.
    texts, num_taken = stream(tokenizer, token_ids, ("XY",), min_tokens=3)
    assert (texts[-1], num_taken) == ("ab", 4)


def test_a_newline_in_byte_tokens_stops_at_once() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    token_ids = ids_of(tokenizer, "▁a", "<0x0A>", "<0x0A>", "<0xE4>", "b")
    texts, num_taken = stream(tokenizer, token_ids, ("\n\n",))
    assert (texts[-1], num_taken) == ("a", 3)


def test_a_tokenizer_with_a_decode_of_its_own_keeps_it():
    class Shouting(PreTrainedTokenizerFast):
        def decode(self, token_ids, **options):
            return super().decode(token_ids, **options).upper()

    tokenizer = Shouting(tokenizer_object=word_tokenizer().backend_tokenizer)
    detokenizer = Detokenizer(tokenizer, [])
    for token_id in (3, 4):
        detokenizer.append(token_id, look_for_stop=True)
    assert detokenizer.text == decode_whole(tokenizer, [3, 4]) == "W3 W4"


# --- texts of single tokens, for log-probabilities ----------------------------------------------


def named(
    tokenizer: Any, token_ids: list[int], others: tuple[int, ...] = ()
) -> tuple[list[TokenText], str]:
    """What each token is called in their text, and the half character at its end."""
    texts = TokenTexts(Vocabulary(tokenizer))
    return [texts.take(token, others)[token] for token in token_ids], texts.rest()


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_texts_of_tokens_are_together_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    last_id = len(tokenizer) + 3 if tokenizer.is_fast else len(tokenizer) - 1
    token_ids = data.draw(st.lists(st.integers(0, last_id), max_size=40))
    if kind == "byte-fallback":  # a byte may make those before it invalid, which have been named
        token_ids = [token for token in token_ids if tokenizer.decode([token]) != "\ufffd"]
    found, rest = named(tokenizer, token_ids)
    assert "".join(each.text for each in found) + rest == full_decode(tokenizer, token_ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=st.text("ab 你好😀é\n", max_size=20))
def test_names_and_bytes_of_tokens_are_together_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assume("<unk>" not in tokenizer.convert_ids_to_tokens(token_ids))
    whole = full_decode(tokenizer, token_ids)
    found, rest = named(tokenizer, token_ids)
    assert rest == ""
    assert "".join(each.name for each in found) == whole
    assert b"".join(each.spelled for each in found) == whole.encode()


@pytest.mark.parametrize("kind", ["metaspace", "byte-fallback"])
def test_a_token_keeps_its_space_except_at_the_beginning(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    word, end = ids_of(tokenizer, "▁a" if kind == "byte-fallback" else "▁", "</s>")
    inner = ids_of(tokenizer, "b")[0]
    names = [each.name for each in named(tokenizer, [inner, word, inner, word, end])[0]]
    space = " a" if kind == "byte-fallback" else " "
    assert names == ["b", space, "b", space, "</s>"]
    assert named(tokenizer, [word])[0][0].name == space.strip()
    texts = TokenTexts(Vocabulary(tokenizer))
    texts.take(inner, [])
    both = texts.take(word, [inner])
    assert (both[word].name, both[inner].name) == (space, "b")


def test_a_long_text_takes_no_longer_for_each_token() -> None:
    plain = TOKENIZERS["byte-level"]
    tokenizer = CountingTokenizer(tokenizer_object=plain.backend_tokenizer)
    texts = TokenTexts(Vocabulary(tokenizer))
    for token in (token_ids := plain.encode(LINES[0] * 50)):
        texts.take(token, [])
    assert tokenizer.num_decoded < 40 * len(token_ids)
    assert texts._detokenizer is not None
    assert len(texts._detokenizer.text) < 100
