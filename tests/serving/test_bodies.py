"""Bodies of requests: counted before any work, text that can be written, fields kept or refused."""

import json
import re
import shutil

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from helpers.servers import byte_tokenizer, serve, wait_for
from milestone_llm import __version__

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "Hello"}]
PART = {"type": "text", "text": ""}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def chat(*messages, **fields):
    return {"messages": list(messages), "max_tokens": 1, **fields}


def said(content, **fields):
    return chat({"role": "user", "content": content}, **fields)


def prompt(**fields):
    return {"prompt": "a", "max_tokens": 1, **fields}


def refusal_of(server, path, body):
    status, answer = server.fetch("POST", path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
    return answer["error"]


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (COMPLETIONS, b"{", "no valid JSON", None),
        (COMPLETIONS, b"", "", None),
        (COMPLETIONS, [], "valid dictionary", None),
        (COMPLETIONS, {}, "prompt: Field required", "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt: it must be text, token ids", "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [[5], []]}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [5000]}, "token id 5000", "prompt"),
        (COMPLETIONS, {"prompt": [10**6], "echo": True}, "token ids", "prompt"),
        (COMPLETIONS, {"prompt": "a" * 300}, "300 tokens, but max_model_len=256", "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "at least 1", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature must be", "temperature"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", "seed"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream=true", "stream_options"),
        (
            COMPLETIONS,
            {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats: Input should be False",
            "stream_options",
        ),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt", "cache_salt"),
        (CHATS, {"messages": []}, "messages", "messages"),
        (CHATS, chat(*HELLO, logit_bias={"a": 1}), "'a' is no token", "logit_bias"),
        (CHATS, chat(*HELLO, logit_bias={"05": 1, "5": 2}), "'05' is no token", "logit_bias"),
        (CHATS, chat(*HELLO, logit_bias={"5000": 1}), "logit_bias holds", "logit_bias"),
        (CHATS, said("a", chat_template_kwargs={"opening": "a" * 10**4}), "10,0", "messages"),
        (
            CHATS,
            said("a", chat_template_kwargs={"tokenize": False}),
            "tokenize is an option",
            "chat_template_kwargs",
        ),
        (CHATS, chat(*HELLO, top_logprobs=3), "needs logprobs", "top_logprobs"),
        (CHATS, said(None), "messages.0: a message of role user needs", "messages"),
        (CHATS, said({}), "messages.0.content: it must be text or a list of", "messages"),
        (
            CHATS,
            chat({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}),
            "messages.0.function_call is the old form",
            "messages",
        ),
        (CHATS, said([IMAGE]), "image_url are not supported", "messages"),
        (DETOKENIZE, {"tokens": [-1]}, "token ids", "tokens"),
        (TOKENIZE, {}, "either prompt or messages", "prompt"),
    ],
)
def test_what_is_wrong_is_said_in_openais_words(m4, path, body, message, param):
    error = refusal_of(m4, path, body)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        said("a", x=[{"y": "\ud83d"}]),
        chat({"role": "user", "content": "a", "\ud800": "b"}),
        b'{"prompt": "a", "user": "\xed\xa0\x80"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a", "whatever": NaN}',
    ],
)
def test_half_of_a_pair_and_what_else_is_no_json_is_refused_wherever_it_stands(m4, body):
    assert "no valid JSON" in refusal_of(m4, CHATS, body)["message"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, b'{"prompt": "a", "seed": 1, "seed": 1}', "'seed'"),
        (CHATS, b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "'content'"),
        (TOKENIZE, b'{"prompt": "a", "\\u0070rompt": "b"}', "'prompt'"),
    ],
)
def test_an_object_that_has_a_name_twice_is_refused(m4, path, body, name):
    assert name in refusal_of(m4, path, body)["message"]


@pytest.mark.parametrize("number", ["1e999", "-1.5E400"])
def test_a_number_that_no_float_holds_is_refused_wherever_it_stands(m4, number):
    body = f'{{"prompt": "a", "max_tokens": 1, "other": [{{"x": {number}}}]}}'
    message = refusal_of(m4, COMPLETIONS, body.encode())["message"]
    assert message == f"the body: the number {number} is too large"


# --- how much -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHATS, chat({"role": "r" * 10**6, "content": "a"}), "role.*at most 1024 characters"),
        (CHATS, chat({**HELLO[0], "x": [{"b" * 10**4: 1}]}), "characters, but"),
        (CHATS, chat(*[{"role": "u", "content": ""}] * 256), "256 messages, but max_model"),
        (CHATS, chat(*[{"role": "u", "content": ""}] * 10**4), "lists, objects and texts"),
        (CHATS, said([PART] * 10**4), "lists, objects and texts"),
        (COMPLETIONS, prompt(stop=["b"] * 65), "stop must be a list of at most 64 strings"),
        (COMPLETIONS, prompt(stop=["b"] * 10**5), "lists, objects and texts"),
        (COMPLETIONS, prompt(logit_bias={str(i): 1 for i in range(1025)}), "1025 token ids"),
        (COMPLETIONS, prompt(whatever=[1] * 10**6), "values"),
        (COMPLETIONS, b'{"prompt": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}", "recursion limit"),
        (COMPLETIONS, {"prompt": "a" * 10**6}, "1,000,000 characters, but"),
        (COMPLETIONS, {"prompt": [7] * 10**4}, "the prompt has 10000 tokens, but"),
        (COMPLETIONS, {"prompt": [[7]] * 261}, "261 completions are asked for"),
        (
            COMPLETIONS,
            {"prompt": [[7] * 250] * 25, "echo": True, "logprobs": 20, "max_tokens": 1},
            "6,250 prompt tokens .* is 131,250 log-probabilities.*at most 131,072",
        ),
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
    assert m4.fetch("POST", CHATS, said([PART] * 200))[0] == 200
    assert m4.fetch("POST", COMPLETIONS, {"prompt": [[7] * 200] * 200, "max_tokens": 1})[0] == 200
    full = prompt(stop=["b" * 256] * 64, stop_token_ids=[5] * 1024, n=2)
    assert m4.fetch("POST", COMPLETIONS, full)[0] == 200


def test_a_refusal_of_much_is_short(m4):
    for body in (prompt(model="m" * 1000), prompt(stop=[5] * 200), prompt(n=10**4000)):
        status, answer = m4.fetch("POST", COMPLETIONS, body)
        assert status in (400, 404)
        assert len(json.dumps(answer)) < 1000


# --- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name", "nothing", "something"),
    [
        (COMPLETIONS, "best_of", 1, 2),
        (COMPLETIONS, "chat_template_kwargs", {}, {"a": 1}),
        (TOKENIZE, "chat_template_kwargs", {}, {"a": 1}),
        (CHATS, "modalities", ["text"], ["audio"]),
        (CHATS, "guided_json", None, {}),
        (CHATS, "json_schema", None, {"type": "object"}),
        (CHATS, "ebnf", None, 'root ::= "a"'),
        (COMPLETIONS, "regex", None, "a|b"),
        (COMPLETIONS, "grammar", None, 'root ::= "a"'),
        (COMPLETIONS, "guided_decoding", None, {"regex": "a"}),
        (COMPLETIONS, "structural_tag", None, "{}"),
        (CHATS, "add_special_tokens", False, True),
        (COMPLETIONS, "prompt_embeds", None, "a"),
        (CHATS, "repeat_penalty", 1.0, 1.3),
        (CHATS, "typical_p", 1, 0.5),
        (CHATS, "include_reasoning", True, False),
        (DETOKENIZE, "skip_special_tokens", True, False),
    ],
)
def test_what_is_not_supported_is_refused_by_name(m4, path, name, nothing, something):
    body = {"tokens": [5]} if path == DETOKENIZE else prompt() if path != CHATS else chat(*HELLO)
    assert m4.fetch("POST", path, {**body, name: nothing})[0] == 200
    error = refusal_of(m4, path, {**body, name: something})
    assert error["param"] == name
    assert f"{name} is not supported" in error["message"]


def test_fields_of_vllm_for_tokens_and_texts_reach_the_engine(m4):
    def choice(**fields):
        body = prompt(max_tokens=4, temperature=0, ignore_eos=True, **fields)
        status, answer = m4.fetch("POST", COMPLETIONS, body)
        assert status == 200, answer
        return answer["choices"][0]

    text = choice()["text"]
    assert choice(bad_words=[text[:2]])["text"][:2] != text[:2]
    assert choice(allowed_token_ids=[0])["text"] == ""
    shown = choice(allowed_token_ids=[0], skip_special_tokens=False)
    assert (shown["text"], "stop_reason" in shown) == ("<pad>" * 4, False)
    named = choice(allowed_token_ids=[0], skip_special_tokens=False, logprobs=0)["logprobs"]
    assert (named["tokens"], named["text_offset"]) == (["<pad>"] * 4, [0, 5, 10, 15])
    kept = choice(stop=text[1], include_stop_str_in_output=True)
    assert (kept["text"], kept["stop_reason"]) == (text[: text.index(text[1]) + 1], text[1])


def test_what_asks_for_nothing_and_what_nobody_knows_is_ignored(m4):
    notes = {"user": "me", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True}
    notes |= {"tools": [], "response_format": {"type": "text"}, "logit_bias": None, "unknown": 1}
    assert m4.fetch("POST", CHATS, chat(*HELLO, **notes))[0] == 200


def test_the_log_names_fields_that_are_ignored_once(m4):
    def num_lines(name):
        return sum(name in line for line in m4.log.read_text().splitlines())

    for _ in range(2):
        assert m4.fetch("POST", COMPLETIONS, prompt(new_in_2031=1, best_of=1))[0] == 200
    assert m4.fetch("POST", CHATS, chat(*HELLO, new_in_2031=1, **{"a\nb": 2}))[0] == 200
    wait_for(lambda: num_lines(r"'a\nb'"))
    assert num_lines("new_in_2031") == 1
    assert num_lines("best_of") == 0, "it has a meaning, and asks for nothing"


@pytest.mark.parametrize("role", ["tool", "of a fine-tuned model"])
def test_a_role_is_for_the_chat_template_to_refuse(m4, role):
    messages = [*HELLO, {"role": "assistant", "content": None}, {"role": role, "content": "a"}]
    assert m4.fetch("POST", CHATS, chat(*messages))[0] == 200


def test_special_tokens_are_added_unless_the_client_does_not_want_them(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "with-bos")
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $0", None, [("<s>", 1)])
    tokenizer.save_pretrained(folder)
    options = ("--max-model-len", "64", "--no-page")
    with serve("m1_single", folder, tmp_path / "log", *options) as server:
        assert server.fetch("GET", "/")[0] == server.fetch("GET", "/trace")[0] == 404
        for fields, count in (({}, 2), ({"add_special_tokens": False}, 1)):
            status, answer = server.fetch("POST", TOKENIZE, {"prompt": "a", **fields})
            assert (status, answer["count"]) == (200, count)
            usage = server.fetch("POST", COMPLETIONS, prompt(**fields))[1]["usage"]
            assert usage["prompt_tokens"] == count


# --- keys and salts -------------------------------------------------------------------------------


def cached_tokens(server, key="none", **fields):
    text = "What was said with one salt, another does not find here."
    usage = (
        server.client(key)
        .completions.create(model=server.model, prompt=text, max_tokens=1, extra_body=fields)
        .usage
    )
    return usage.prompt_tokens_details.cached_tokens


def test_salts_keep_prefixes_apart(m4):
    salts = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    assert [cached_tokens(m4, **salt) for salt in salts * 2] == [0, 0, 0, 48, 48, 48]


def test_keys(model_folder, tmp_path):
    """Nobody gets in without one, nor at another's prefixes by a salt."""
    with serve(
        "m4_prefix_chunked", model_folder, tmp_path / "log", "--api-key", "ours", "theirs"
    ) as server:
        for path, status in (
            ("/health", 200),
            ("/ping", 200),
            ("/", 200),
            ("/metrics", 401),
            ("/trace", 401),
            ("/version", 401),
            ("/load", 401),
        ):
            assert server.fetch("GET", path)[0] == status
        assert server.fetch("GET", "/metrics", Authorization="Bearer ours")[0] == 200
        assert server.fetch("GET", "/metrics", Authorization="Basic ours")[0] == 401
        assert server.fetch("POST", "/reset_prefix_cache")[0] == 401
        assert server.fetch("GET", "/health", Host="any.example")[0] == 200, "there is a key"
        for key in ("our", "ours2"):
            with pytest.raises(openai.AuthenticationError):
                server.client(key).models.list()
        found = [
            cached_tokens(server, key, **({"cache_salt": salt} if salt else {}))
            for salt in ("", "a")
            for key in ("ours", "theirs", "ours", "theirs")
        ]
        assert found == [0, 0, 48, 48] * 2


def test_the_prefix_cache_is_forgotten_on_request(server):
    def num_cached():
        body = {"prompt": "a" * 70, "max_tokens": 1}
        status, answer = server.fetch("POST", "/v1/completions", body)
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    num_cached()
    if num_cached() == 0:  # M1 to M3
        status, answer = server.fetch("POST", "/reset_prefix_cache")
        assert (status, answer["error"]["message"][:32]) == (
            400,
            "this engine has no prefix cache:",
        )
        return
    server.wait_until_idle()
    assert server.fetch("POST", "/reset_prefix_cache") == (200, {"status": "ok"})
    assert num_cached() == 0
    assert num_cached() > 0


def test_a_server_tells_its_version_and_its_load(m4):
    assert m4.fetch("GET", "/version") == (200, {"version": __version__})
    m4.wait_until_idle()
    assert m4.fetch("GET", "/load") == (200, {"server_load": 0})


def test_a_cache_in_use_is_not_forgotten(slow):
    with slow.client().completions.create(
        model=slow.model, prompt="a" * 40, max_tokens=900, stream=True
    ) as stream:
        next(iter(stream))
        assert slow.fetch("GET", "/load") == (200, {"server_load": 1})
        assert slow.fetch("POST", "/reset_prefix_cache")[0] == 409
    slow.wait_until_idle()
