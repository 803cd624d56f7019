"""OpenAI's own client, unmodified: what it is answered is what `generate` gives."""

import asyncio
from pathlib import Path

import openai
import pytest

from helpers.servers import serve
from m3_paged import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 24}


def text_of(oracle, prompt, **params):
    return oracle.generate([prompt], SamplingParams(temperature=0, **params))[0].text


def test_two_completions_at_once_and_a_chat_stream_in_every_milestone(server, oracle):
    prompts = ["Hello", "The sea in winter is"]
    chosen = {"temperature": 0, "frequency_penalty": 1.2, "presence_penalty": -0.7}
    params = SamplingParams(**chosen, logit_bias={70: 2.5, 9: -100}, max_tokens=12, ignore_eos=True)
    fields = {**chosen, "model": server.model, "logit_bias": {"70": 2.5, "9": -100}}
    beyond = {"ignore_eos": True}

    async def complete(client, prompt):
        return await client.completions.create(
            prompt=prompt, max_tokens=12, logprobs=0, extra_body=beyond, **fields
        )

    async def chat(client):
        parts = [{"type": "text", "text": "Who are"}, {"type": "text", "text": "you?"}]
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": parts}],
            max_completion_tokens=12,
            stream=True,
            extra_body={**beyond, "chat_template_kwargs": {"opening": "Ah"}},
            **fields,
        )
        return [event.choices[0].delta async for event in stream]

    async def ask_all():
        async with server.async_client() as client:
            asking = [complete(client, prompt) for prompt in prompts]
            return await asyncio.gather(*asking, chat(client))

    *answers, deltas = asyncio.run(ask_all())
    expected = oracle.generate([*prompts, "user: Who are\nyou?\n> Ah"], params)
    for answer, prompt, output in zip(answers, prompts, expected, strict=False):
        (choice,) = answer.choices
        assert choice.text == output.text
        assert len(choice.logprobs.token_logprobs) == len(output.token_ids) == 12
        assert choice.finish_reason == output.finish_reason == "length"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 12)
        assert (usage.total_tokens, answer.id[:5]) == (len(prompt) + 12, "cmpl-")
    assert "".join(delta.content or "" for delta in deltas) == expected[-1].text
    assert deltas[0].role == "assistant"


def test_a_stream_adds_up_to_the_completion(m4, oracle):
    stream = m4.client().completions.create(
        model=m4.model,
        prompt="Hello",
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **GREEDY,
    )
    *events, last = stream
    expected = text_of(oracle, "Hello", max_tokens=24, ignore_eos=True)
    assert "".join(event.choices[0].text for event in events) == expected
    assert [event.choices[0].finish_reason for event in events][-1] == "length"
    assert last.choices == []
    assert {event.usage for event in events} == {None}
    assert "usage" in events[0].model_fields_set, "null, and not left out"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 24)


def test_prompts_come_as_texts_or_tokens_one_or_several(m4, oracle):
    create = m4.client().completions.create
    for prompt, texts in (
        ([40, 41, 42], [[40, 41, 42]]),
        (["one", "two"], ["one", "two"]),
        ([[40, 41], [50]], [[40, 41], [50]]),
    ):
        answer = create(model=m4.model, prompt=prompt, echo=True, **GREEDY)
        echoed = [t if isinstance(t, str) else oracle.tokenizer.decode(t) for t in texts]
        generated = [text_of(oracle, t, max_tokens=24) for t in texts]
        expected = [a + b for a, b in zip(echoed, generated, strict=True)]
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_completions_of_several_prompts(m4, oracle, is_stream):
    answer = m4.client().completions.create(
        model=m4.model, prompt=["one", "two"], n=2, seed=7, max_tokens=9, stream=is_stream
    )
    texts = [""] * 4
    for part in answer if is_stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    expected = oracle.generate(["one", "two"], SamplingParams(n=2, seed=7, max_tokens=9))
    assert texts == [each.text for output in expected for each in output.outputs]


def test_several_completions_need_shared_kv(servers):
    m2 = servers("m2_batching")
    with pytest.raises(openai.BadRequestError, match="from m3_paged on"):
        m2.client().completions.create(model=m2.model, prompt="a", n=2)


def test_logprobs_are_the_engines(m4, oracle):
    client = m4.client()
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    expected = oracle.generate(["user: a\n> "], params)[0]
    values = [
        step[token].logprob
        for step, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]

    answer = client.completions.create(
        model=m4.model, prompt="user: a\n> ", logprobs=2, temperature=0, max_tokens=6
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(values, abs=1e-4)
    assert "".join(found.tokens) == answer.choices[0].text == expected.text
    assert found.text_offset == [sum(map(len, found.tokens[:place])) for place in range(6)]
    assert all(
        max(top.values()) == top[name]
        for top, name in zip(found.top_logprobs, found.tokens, strict=True)
    )

    stream = client.chat.completions.create(
        model=m4.model,
        messages=[{"role": "user", "content": "a"}],
        logprobs=True,
        top_logprobs=2,
        temperature=0,
        max_tokens=6,
        stream=True,
    )
    tokens = [token for event in stream for token in event.choices[0].logprobs.content]
    assert [token.logprob for token in tokens] == pytest.approx(values, abs=1e-4)
    assert [len(token.top_logprobs) for token in tokens] == [2] * 6
    assert "".join(token.token for token in tokens) == expected.text
    spelled = b"".join(bytes(token.bytes) for token in tokens)
    assert spelled.decode(errors="replace") == expected.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_scores_the_prompt(m4, oracle, is_stream):
    """As lm-eval asks: prompts as tokens, one token of output."""
    prompts = [[40, 41, 42, 43], [50, 51]]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    answer = m4.client().completions.create(
        model=m4.model,
        prompt=prompts,
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        stream=is_stream,
    )
    choices = [choice for part in (answer if is_stream else [answer]) for choice in part.choices]
    assert sorted(choice.index for choice in choices) == [0, 1]
    for choice in choices:
        output = oracle.generate([prompts[choice.index]], params)[0]
        tokens = output.prompt_token_ids + output.token_ids
        steps = output.prompt_logprobs[1:] + output.logprobs
        values = [step[token].logprob for step, token in zip(steps, tokens[1:], strict=True)]
        assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(values, abs=1e-4)
        assert choice.text == oracle.tokenizer.decode(prompts[choice.index]) + output.text


def test_a_prompt_can_be_scored_without_output(m4):
    eos = {"2": 100}  # the engine samples a token, which is not sent
    answer = m4.client().completions.create(
        model=m4.model, prompt=[40, 41], echo=True, logprobs=0, max_tokens=0, logit_bias=eos
    )
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == 2
    assert (
        answer.choices[0].text == m4.fetch("POST", "/detokenize", {"tokens": [40, 41]})[1]["prompt"]
    )
    assert answer.usage.completion_tokens == 0


def test_of_two_limits_of_a_chat_the_newer_one_counts(m4):
    answer = m4.client().chat.completions.create(
        model=m4.model,
        messages=[{"role": "user", "content": "a"}],
        max_completion_tokens=5,
        max_tokens=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("max_tokens", [None, 10**6])
def test_a_chat_that_comes_to_the_models_length_ends_there(m4, max_tokens):
    answer = m4.client().chat.completions.create(
        model=m4.model,
        messages=[{"role": "user", "content": "a" * 240}],
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 256


def test_models_and_tokens(m4):
    assert m4.client().models.retrieve(m4.model).id == m4.model
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'"):
        m4.client().models.retrieve("gpt-5")
    (model,) = m4.client().models.list()
    assert model.id == "tiny-bytes"
    status, tokens = m4.fetch("POST", "/tokenize", {"prompt": "héllo"})
    assert (status, tokens["count"], tokens["max_model_len"]) == (200, 6, 256)
    assert m4.fetch("POST", "/detokenize", {"tokens": tokens["tokens"]}) == (
        200,
        {"prompt": "héllo"},
    )
    status, chat = m4.fetch("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert chat["count"] == len("user: a\n> ")
    for text in ("", "a" * 300):  # no prompt to compute, and counted all the same
        status, tokens = m4.fetch("POST", "/tokenize", {"prompt": text})
        assert (status, tokens["count"]) == (200, len(text))


def test_a_model_without_tokenizer_takes_tokens(tmp_path):
    with serve(
        "m2_batching", Path("tiny-llama"), tmp_path / "log", "--max-model-len", "64"
    ) as bare:
        answer = bare.client().completions.create(
            model="tiny-llama", prompt=[3, 4, 5], max_tokens=3, logprobs=0
        )
        assert answer.choices[0].text == ""
        assert len(answer.choices[0].logprobs.tokens) == 3
        assert answer.choices[0].logprobs.tokens[0].startswith("token_id:")
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            bare.client().completions.create(model="tiny-llama", prompt="text")
