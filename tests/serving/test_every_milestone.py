"""A server of every milestone, over real HTTP: what it answers is what `generate` gives."""

import asyncio

import m3_paged


def test_two_completions_at_once_and_a_chat_stream(server, oracle):
    prompts = ["Hello", "The sea in winter is"]
    chosen = {"temperature": 0, "frequency_penalty": 1.2, "presence_penalty": -0.7}
    params = m3_paged.SamplingParams(
        **chosen, logit_bias={70: 2.5, 9: -100}, max_tokens=12, ignore_eos=True
    )
    fields = {**chosen, "model": server.model, "logit_bias": {"70": 2.5, "9": -100}}
    beyond = {"ignore_eos": True}

    async def complete(client, prompt):
        answer = await client.completions.create(
            prompt=prompt, max_tokens=12, logprobs=0, extra_body=beyond, **fields
        )
        return answer.choices[0]

    async def chat(client):
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": "Who are you?"}],
            max_completion_tokens=12,
            stream=True,
            extra_body={**beyond, "chat_template_kwargs": {"opening": "Ah"}},
            **fields,
        )
        return [event.choices[0].delta.content or "" async for event in stream]

    async def ask_all():
        async with server.async_client() as client:
            asking = [complete(client, prompt) for prompt in prompts]
            return await asyncio.gather(*asking, chat(client))

    *choices, parts = asyncio.run(ask_all())
    expected = oracle.generate([*prompts, "user: Who are you?\n> Ah"], params)
    for choice, output in zip(choices, expected, strict=False):
        assert choice.text == output.text
        assert len(choice.logprobs.token_logprobs) == len(output.token_ids) == 12
        assert choice.finish_reason == output.finish_reason == "length"
    assert "".join(parts) == expected[-1].text
