"""Answers with log-probabilities: large ones let others have their turn."""

import asyncio
import json
import math
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.servers import async_engine
from m3_paged import SamplingParams
from milestone_llm.core.outputs import EngineCoreOutput, Logprob, RequestFacts
from milestone_llm.serving.api.protocol import ChatRequest, CompletionRequest
from milestone_llm.serving.api.response_bodies import ResponseBodies
from milestone_llm.serving.api.responses import ApiResponse
from milestone_llm.serving.api.token_texts import TokenTexts, Vocabulary
from milestone_llm.serving.engine.client import EngineCoreOutputs, EngineRequest

NUM_CHOICES = 3


class Tokenizer:
    """Its tokens are letters. Remembers the threads in which it decodes."""

    def __init__(self):
        self.threads = set()

    def convert_ids_to_tokens(self, token_id):
        return chr(token_id)

    def decode(self, token_ids, **options):
        self.threads.add(threading.current_thread().name)
        return "".join(map(chr, token_ids))


@pytest.fixture
def tokenizing():
    """A pool of one thread."""
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        yield pool


def answered(params, is_stream, tokenizing):
    """What a client is sent, in parts, and the threads in which tokens were decoded."""
    parts, tokenizer = [], Tokenizer()

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
        engine.deliver(asyncio.get_running_loop(), message)
        body = CompletionRequest(prompt=[65, 66], echo=True)
        bodies = ResponseBodies(request, "r", "m", body, ["AB"] * 3, Vocabulary(tokenizer))
        await ApiResponse(request, bodies, is_stream, tokenizing)({"type": "http"}, receive, send)

    asyncio.run(run())
    return b"".join(parts), tokenizer.threads


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


# --- names of tokens -----------------------------------------------------------------------------

WORDS = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS += ["▁base", "base", "▁the", ",", "▁"]


def spaced_tokenizer():
    """Llama 2's kind: words have their space, and the first space of a text is dropped."""
    tokens = {word: token_id for token_id, word in enumerate(WORDS)}
    tokenizer = Tokenizers(models.BPE(tokens, [], unk_token="<unk>", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:2]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def ids(*words):
    return [WORDS.index(word) for word in words]


def named_answer(body, prompt, tokens, others=(), is_stream=False):
    """The first choice of an answer with these tokens, and its log-probabilities. In each place,
    `others` were likelier."""
    tokenizer, texts = spaced_tokenizer(), [""]
    is_echo = isinstance(body, CompletionRequest) and body.echo
    if is_echo:
        texts = [body.prompt if isinstance(body.prompt, str) else tokenizer.decode(prompt)]
    logprobs = [
        {token: Logprob(-9.0, 9)} | {each: Logprob(-i, i) for i, each in enumerate(others, 1)}
        for token in [*prompt, *tokens]
    ]

    async def run():
        engine = async_engine(tokenizer)
        request = engine.open_request(1)
        most = len(others)
        params = SamplingParams(logprobs=most, prompt_logprobs=most if is_echo else None)
        request.start([EngineRequest("r", prompt, params)], is_stream, None)
        bodies = ResponseBodies(request, "r", "m", body, texts, Vocabulary(tokenizer))
        events = []
        for place, token in enumerate(tokens):
            message = EngineCoreOutputs()
            of_prompt = [None, *logprobs[1 : len(prompt)]] if is_echo else None
            facts = None if place else RequestFacts(prompt_logprobs=of_prompt)
            reason = "length" if place == len(tokens) - 1 else None
            new = logprobs[len(prompt) + place]
            message.add(EngineCoreOutput("r", [token], [new], reason, facts))
            engine.deliver(asyncio.get_running_loop(), message)
            await asyncio.sleep(0)
            if is_stream:
                events.append(bodies.events(await request.outputs()))
        if not is_stream:
            return [b"".join(bodies.whole([state.snapshot() for state in request.states]))]
        return [line[6:] for event in events for line in event.splitlines() if line]

    choices = [json.loads(answer)["choices"][0] for answer in asyncio.run(run())]
    if isinstance(body, ChatRequest):
        said = [choice.get("message") or choice["delta"] for choice in choices]
        tokens = [each for choice in choices for each in choice["logprobs"]["content"]]
        return "".join(each["content"] for each in said), tokens
    fields = choices[0]["logprobs"]
    joined = {
        name: [each for choice in choices for each in choice["logprobs"][name]] for name in fields
    }
    return "".join(choice["text"] for choice in choices), joined


EURO = ids("<0xE2>", "<0x82>", "<0xAC>")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("tokens", "names"),
    [
        (ids("▁the", "▁base", "base", ",", "▁base"), ["the", " base", "base", ",", " base"]),
        ([*ids("▁the"), *EURO, *ids("base")], ["the", "", "", "€", "base"]),
        (ids("▁the", "<0x0A>", "<0x0A>", "▁the"), ["the", "\n", "\n", " the"]),
        ([*ids("base"), *EURO[:2]], ["base", "", "��"]),
        ([*ids("base"), *EURO[:1], *ids("▁the")], ["base", "", "� the"]),
        (ids("base", "<s>", "▁the", "</s>"), ["base", "<s>", " the", "</s>"]),
    ],
)
def test_names_bytes_and_offsets_are_those_of_the_text(tokens, names, is_stream):
    hello = [{"role": "user", "content": "a"}]
    body = ChatRequest(messages=hello, logprobs=True)
    content, found = named_answer(body, ids("base"), tokens, is_stream=is_stream)
    assert [each["token"] for each in found] == names
    shown = [name for name in names if name not in ("<s>", "</s>")]
    assert "".join(shown) == content
    spelled = b"".join(bytes(each["bytes"]) for each in found)
    # half a character: tokenizers write one U+FFFD for each byte, Python one for both
    assert spelled.decode(errors="replace") == content.replace("��", "�")

    for prompt, before in (("the base,", ids("<s>", "▁the", "▁base", ",")), (ids("▁the"), None)):
        for echo in (False, True):
            body = CompletionRequest(prompt=prompt, echo=echo, logprobs=0)
            text, found = named_answer(body, before or prompt, tokens, is_stream=is_stream)
            assert found["tokens"][-len(names) :] == names
            places = zip(found["tokens"], found["text_offset"], strict=True)
            wrong = [
                (name, place)
                for name, place in places
                if name not in ("<s>", "</s>") and text[place : place + len(name)] != name
            ]
            assert not wrong
            assert max(found["text_offset"]) <= len(text)
            assert found["text_offset"][0] == 0


def test_what_is_echoed_of_token_ids_may_show_special_tokens():
    body = CompletionRequest(prompt=ids("<s>", "▁the"), echo=True, logprobs=0)
    text, found = named_answer(body, ids("<s>", "▁the"), ids("base"))
    assert (text, found["text_offset"]) == ("<s> thebase", [0, 4, 7])


def test_tokens_of_one_name_are_all_there_and_the_likeliest_is_another_one():
    """The lm-eval harness takes a token for the likeliest if it has the likeliest one's name."""
    likelier = ids("▁base", "<0xE3>")
    body = ChatRequest(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2)
    _, found = named_answer(body, ids("base"), ids("base"), likelier)
    assert [each["token"] for each in found[0]["top_logprobs"]] == ["base", ""]

    body = CompletionRequest(prompt="the", logprobs=2, echo=True)
    _, found = named_answer(body, ids("▁the"), [*ids("base"), *EURO, *ids("base")], likelier)
    top = found["top_logprobs"]
    other = [f"token_id:{token}" for token in likelier]
    assert top[0] is None
    assert top[1] == {other[0]: -1, "": -2, "base": -9}, "at the beginning both are `base`"
    assert top[2] == {" base": -1, other[1]: -2, "": -9}, "both begin a character"
    assert top[5] == {" base": -1, "": -2, "base": -9}
    likeliest = [max(each, key=each.get) for each in top[1:]]
    assert not any(map(operator.eq, likeliest, found["tokens"][1:]))


def test_without_a_tokenizer_tokens_have_the_names_that_vllm_gives():
    texts = TokenTexts(Vocabulary(None))
    assert texts.take(7, [8]) == {7: ("token_id:7", "", b""), 8: ("token_id:8", "", b"")}
    assert texts.rest() == ""
