"""Nothing that a client sends harms another, and each is told what was wrong."""

import json

import pytest

from serving_helpers import http_request, read_answer

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (COMPLETIONS, b"{", "no valid JSON", None),
        (COMPLETIONS, b"", "", None),
        (COMPLETIONS, b"\xff\xfe", "", None),
        (COMPLETIONS, [], "valid dictionary", None),
        (COMPLETIONS, {}, "prompt: Field required", "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt: it must be text, token ids", "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt: it must be text, token ids", "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop": ["b", 1]}, "stop: it must be text or a", "stop"),
        (COMPLETIONS, {"prompt": []}, "prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [[5], []]}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": [5000]}, "token id 5000", None),
        (COMPLETIONS, {"prompt": "a" * 300}, "300 tokens, but max_model_len=256", "prompt"),
        (COMPLETIONS, {"prompt": "a" * 10**6}, "1,000,000 characters, but", "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "at least 1", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature must be", "temperature"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "temperature", "temperature"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', "half of a pair", "prompt"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed", "seed"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n: ", "n"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop must be", "stop"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "less than or equal to 20", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "guided_json": {}}, "is not supported", "guided_json"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream=true", "stream_options"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix is not supported", "suffix"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of is not supported", "best_of"),
        (CHATS, {"messages": []}, "messages", "messages"),
        (CHATS, {"messages": HELLO, "tools": [{}]}, "tools is not supported", "tools"),
        (CHATS, {"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
        (CHATS, {"messages": HELLO, "top_logprobs": 3}, "needs logprobs", "top_logprobs"),
        (CHATS, {"messages": HELLO, "top_logprobs": 21}, "or equal to 20", "top_logprobs"),
        (CHATS, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "of a pair", "messages"),
        (CHATS, {"messages": IMAGE}, "image_url are not supported", "messages"),
        (
            CHATS,
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            "response_format is not supported",
            "response_format",
        ),
        ("/detokenize", {"tokens": [-1]}, "token ids", "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "token ids", "tokens"),
        ("/tokenize", {}, "either prompt or messages", "prompt"),
    ],
)
def test_what_is_wrong_is_said_in_openais_words(m4, path, body, message, param):
    status, answer = m4.fetch("POST", path, body)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


def test_what_asks_for_nothing_and_what_nobody_knows_is_ignored(m4):
    body = {"messages": HELLO, "max_tokens": 1, "tools": [], "response_format": {"type": "text"}}
    body |= {"frequency_penalty": 0.0, "logit_bias": None, "no_such_field": 1, "user": "me"}
    assert m4.fetch("POST", CHATS, body)[0] == 200


def test_other_models_other_paths_other_methods(m4):
    status, answer = m4.fetch("POST", COMPLETIONS, {"prompt": "a", "model": "gpt-5"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'tiny-bytes'" in answer["error"]["message"]
    assert m4.fetch("POST", "/v2", {})[1]["error"]["type"] == "invalid_request_error"
    assert m4.fetch("GET", COMPLETIONS)[0] == 405


def test_half_a_request(m4):
    whole = http_request("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    for end in (10, 60, len(whole) - 3):
        with m4.connect() as connection:
            connection.sendall(whole[:end])
    with m4.connect() as slow_writer:
        slow_writer.sendall(whole[:-3])
        assert m4.fetch("POST", COMPLETIONS, {"prompt": "a"})[0] == 200, "others do not wait"
        slow_writer.sendall(whole[-3:])
        assert read_answer(slow_writer)[0] == 200
    m4.wait_until_idle()


def test_a_client_that_does_not_read_gets_it_all_in_the_end(m4):
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    expected = m4.fetch("POST", COMPLETIONS, body)[1]["choices"][0]["text"]
    with m4.send(COMPLETIONS, {**body, "stream": True, "logprobs": 20}) as connection:
        m4.wait_until_idle()  # the engine does not wait for it
        _, _, answer = read_answer(connection)
    *events, last = answer.strip().split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(each.removeprefix("data: ")) for each in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
