"""Bodies of requests: counted before any work, text that can be written, fields kept or refused."""

import json
import re
import shutil

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from m4_prefix_chunked import SamplingParams
from serving_helpers import byte_tokenizer, serve

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "Hello"}]
PART = {"type": "text", "text": ""}


def chat(*messages, **fields):
    return {"messages": list(messages), "max_tokens": 1, **fields}


def prompt(**fields):
    return {"prompt": "a", "max_tokens": 1, **fields}


def refusal_of(server, path, body):
    status, answer = server.fetch("POST", path, body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    return answer["error"]


# --- how much -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHATS, chat({"role": "r" * 10**6, "content": "a"}), "role.*at most 1024 characters"),
        (CHATS, chat({"role": "user", "content": "a", "x": "b" * 10**4}), "10,0.. characters, but"),
        (CHATS, chat({"role": "user", "content": "a", "x": {"b" * 10**4: 1}}), "characters, but"),
        (CHATS, chat({"role": "user", "content": "a", "x": [["b" * 10**4]]}), "characters, but"),
        (CHATS, chat(*[{"role": "u", "content": ""}] * 256), "256 messages, but max_model"),
        (TOKENIZE, chat(*[{"role": "u", "content": ""}] * 256), "256 messages, but max_model"),
        (CHATS, chat(*[{"role": "u", "content": ""}] * 10**4), "lists, objects and texts"),
        (CHATS, chat({"role": "user", "content": [PART] * 10**4}), "lists, objects and texts"),
        (COMPLETIONS, prompt(stop=["b"] * 10**5), "lists, objects and texts"),
        (COMPLETIONS, prompt(stop=["b"] * 65), "stop must be a list of at most 64 strings"),
        (COMPLETIONS, prompt(stop="b" * 257), "each of 1 to 256 characters"),
        (COMPLETIONS, prompt(stop_token_ids=[5] * 1025), "stop_token_ids must be .*at most 1,024"),
        (COMPLETIONS, prompt(stop_token_ids=[5] * 10**6), "values"),
        (COMPLETIONS, prompt(logit_bias={str(i): 1 for i in range(1025)}), "1025 token ids"),
        (COMPLETIONS, prompt(whatever=[1] * 10**6), "values"),
        (COMPLETIONS, prompt(whatever=[[]] * 50_000), "lists, objects and texts"),
        (COMPLETIONS, prompt(whatever={str(i): 1 for i in range(10**5)}), "objects and texts"),
        (COMPLETIONS, b'{"prompt": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}", "recursion limit"),
        (COMPLETIONS, {"prompt": [7] * 10**5}, "values"),
        (COMPLETIONS, {"prompt": [7] * 10**4}, "the prompt has 10000 tokens, but"),
        (COMPLETIONS, {"prompt": [[7]] * 261}, "261 completions are asked for"),
        (
            COMPLETIONS,
            {"prompt": [[7] * 250] * 25, "echo": True, "logprobs": 20, "max_tokens": 1},
            "6,250 prompt tokens .* is 131,250 log-probabilities.*at most 131,072",
        ),
        (COMPLETIONS, prompt(echo=True, logprobs=20, n=260, prompt="a" * 30), "163,800 log-prob"),
        (COMPLETIONS, prompt(model="m" * 10**5), "at most 1024 characters"),
        (COMPLETIONS, prompt(cache_salt="s" * 1025), "at most 1024 characters"),
        (DETOKENIZE, {"tokens": [5] * 257}, "257 tokens.*at most 256"),
    ],
)
def test_more_than_a_prompt_could_need_is_refused_with_the_limit(m4, path, body, message):
    error = refusal_of(m4, path, body)
    assert len(error["message"]) < 600
    assert re.search(message, error["message"]), error["message"]


def test_what_a_prompt_may_need_is_let_in(m4):
    """Commas, brackets and quotes within a text are text."""
    for text in ('[{",' * 60, '\\"' * 100, "\\" * 201, "\N{GRINNING FACE}"):
        assert m4.fetch("POST", TOKENIZE, {"prompt": text})[0] == 200
    assert m4.fetch("POST", TOKENIZE, chat(*[{"role": "u", "content": ""}] * 255))[0] == 200
    parts = {"role": "u", "content": [PART] * 200}
    assert m4.fetch("POST", CHATS, chat(parts))[0] == 200
    assert m4.fetch("POST", COMPLETIONS, {"prompt": [[7] * 200] * 200, "max_tokens": 1})[0] == 200
    full = prompt(stop=["b" * 256] * 64, stop_token_ids=[5] * 1024, n=2)
    assert m4.fetch("POST", COMPLETIONS, full)[0] == 200


def test_a_refusal_of_much_is_short(m4):
    for body in (prompt(model="m" * 1000), prompt(stop=[5] * 200), prompt(n=10**4000)):
        status, answer = m4.fetch("POST", COMPLETIONS, body)
        assert status in (400, 404)
        assert len(json.dumps(answer)) < 1000


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, chat({"role": "user", "content": [{"type": "\ud800"}]})),
        (CHATS, chat({"role": "\udc00", "content": "a"})),
        (CHATS, chat({"role": "user", "content": "a", "\ud800": "b"})),
        (CHATS, chat({"role": "user", "content": "a", "x": [{"y": "\ud83d"}]})),
        (CHATS, chat(*HELLO, tools=["\ud800"])),
        (CHATS, chat(*HELLO, user="\ud800")),
        (COMPLETIONS, prompt(model="\ud800")),
        (COMPLETIONS, prompt(stop=["\ud800"])),
        (COMPLETIONS, prompt(whatever="\ud800")),
        (COMPLETIONS, prompt(cache_salt="\ud800")),
        (COMPLETIONS, {"prompt": ["a", "\ud800"]}),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}),
        (COMPLETIONS, b'{"prompt": "a", "user": "\xed\xa0\x80"}'),
        (COMPLETIONS, '{"prompt": "a"}'.encode("utf-16")),
        (COMPLETIONS, b'{"prompt": "a", "whatever": NaN}'),
        (TOKENIZE, {"prompt": "a\udfff"}),
        (DETOKENIZE, {"tokens": [5], "model": "\udfff"}),
    ],
)
def test_half_of_a_pair_and_what_else_is_no_json_is_refused_wherever_it_stands(m4, path, body):
    assert "no valid JSON" in refusal_of(m4, path, body)["message"]


# --- fields ---------------------------------------------------------------------------------------


def test_a_seed_is_any_number_of_64_bits(m4):
    def text(seed):
        status, answer = m4.fetch("POST", COMPLETIONS, prompt(seed=seed, max_tokens=20))
        assert status == 200
        return answer["choices"][0]["text"]

    seeds = (-1, -(2**63), 2**63 - 1, 0)
    texts = [text(seed) for seed in seeds]
    assert texts == [text(seed) for seed in seeds]
    assert len(set(texts)) == len(seeds)
    for seed in (2**63, -(2**63) - 1):
        assert refusal_of(m4, COMPLETIONS, prompt(seed=seed))["param"] == "seed"


@pytest.mark.parametrize(
    ("path", "name", "nothing", "something"),
    [
        (COMPLETIONS, "logits_processors", [], ["a.b"]),
        (COMPLETIONS, "prompt_embeds", [], "abc"),
        (COMPLETIONS, "length_penalty", 1.0, 0.5),
        (COMPLETIONS, "return_token_ids", False, True),
        (COMPLETIONS, "return_tokens_as_token_ids", False, True),
        (COMPLETIONS, "kv_transfer_params", {}, {"a": 1}),
        (COMPLETIONS, "vllm_xargs", {}, {"a": 1}),
        (COMPLETIONS, "spaces_between_special_tokens", True, False),
        (COMPLETIONS, "chat_template_kwargs", {}, {"a": 1}),
        (TOKENIZE, "chat_template_kwargs", {}, {"a": 1}),
        (CHATS, "echo", False, True),
        (CHATS, "documents", [], [{"text": "a"}]),
        (CHATS, "reasoning_effort", "none", "low"),
        (CHATS, "add_special_tokens", False, True),
        (CHATS, "request_id", None, "mine"),
        (TOKENIZE, "add_generation_prompt", True, False),
        (TOKENIZE, "tools", [], [{}]),
        (DETOKENIZE, "skip_special_tokens", True, False),
    ],
)
def test_what_is_not_supported_is_refused_by_name(m4, path, name, nothing, something):
    body = {"tokens": [5]} if path == DETOKENIZE else prompt() if path != CHATS else chat(*HELLO)
    assert m4.fetch("POST", path, {**body, name: nothing})[0] == 200
    error = refusal_of(m4, path, {**body, name: something})
    assert error["param"] == name
    assert f"{name} is not supported" in error["message"]


def test_what_asks_for_nothing_of_the_model_stays(m4):
    notes = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False}
    notes |= {"safety_identifier": "x", "prompt_cache_key": "x", "parallel_tool_calls": True}
    assert m4.fetch("POST", CHATS, chat(*HELLO, **notes))[0] == 200


def test_special_tokens_are_added_unless_the_client_does_not_want_them(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "with-bos")
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $0", None, [("<s>", 1)])
    tokenizer.save_pretrained(folder)
    with serve("m1_single", folder, tmp_path / "log", "--max-model-len", "64") as server:
        for fields, count in (({}, 2), ({"add_special_tokens": False}, 1)):
            status, answer = server.fetch("POST", TOKENIZE, {"prompt": "a", **fields})
            assert (status, answer["count"]) == (200, count)
            usage = server.fetch("POST", COMPLETIONS, prompt(**fields))[1]["usage"]
            assert usage["prompt_tokens"] == count


# --- salts ----------------------------------------------------------------------------------------


def cached_tokens(server, key="none", **fields):
    text = "What was said with one salt, another does not find here."
    client = server.client(key)
    usage = client.completions.create(
        model=server.model, prompt=text, max_tokens=1, extra_body=fields
    ).usage
    return usage.prompt_tokens_details.cached_tokens


def test_salts_keep_prefixes_apart(m4):
    salts = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    assert [cached_tokens(m4, **salt) for salt in salts * 2] == [0, 0, 0, 48, 48, 48]


def test_a_salt_is_a_text_that_is_not_empty(m4):
    for salt in ("", 5, ["a"]):
        assert refusal_of(m4, COMPLETIONS, prompt(cache_salt=salt))["param"] == "cache_salt"


def test_every_milestone_takes_a_salt(server):
    assert server.fetch("POST", COMPLETIONS, prompt(cache_salt="a"))[0] == 200


def test_nobody_gets_at_another_keys_prefixes_by_a_salt(model_folder, tmp_path):
    with serve(
        "m4_prefix_chunked", model_folder, tmp_path / "log", "--api-key", "ours", "theirs"
    ) as server:
        found = [
            cached_tokens(server, key, cache_salt=salt)
            for key, salt in (("ours", "a"), ("theirs", "a"), ("ours", "a"), ("theirs", "b"))
        ]
        assert found == [0, 0, 48, 0]
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            cached_tokens(server, "ours", cache_salt="")


# --- SamplingParams, without a server -------------------------------------------------------------


def test_stops_are_few_and_short():
    SamplingParams(stop=["a" * 256] * 64, stop_token_ids=[5] * 1024)
    for fields in ({"stop": ["a"] * 65}, {"stop": "a" * 257}, {"stop_token_ids": [5] * 1025}):
        with pytest.raises(ValueError, match=r"at most|1 to 256") as raised:
            SamplingParams(**fields)
        assert len(str(raised.value)) < 400
