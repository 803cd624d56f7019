"""Random bodies, most of them wrong: each gets 200 or an error in OpenAI's words, and harms nobody.

`make storm` sends many more, and always others.
"""

import json
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.servers import http_request, read_answer
from milestone_llm.serving.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

STORM = os.environ.get("STORM") == "1"
HELLO = {"role": "user", "content": "Hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text"}]}
GOOD = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [HELLO, PARTS], "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [40, 41]},
}
BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
FIELDS = [name for body in BODIES for name in body.model_fields]
FIELDS += ["metadata", "best_of", "role", "content", "type", "text", "no_such_field"]
NUMBERS = (0, 1, 2, 5, -1, 300, 2**63, -(2**63), 10**400, 0.5, -1.0, 1e300, float("nan"))
TEXTS = ("", "a", "user", "text", "\ud800", "a\udfff", "\U0001f600", "</s>", "\0", "ab" * 3000)
PROMPTS = ([HELLO], [{**HELLO, "x": [1]}], [40, 41], ["a", "b"], [[40], [41]])


def deep(value):
    """The same in 200 lists."""
    for _ in range(200):
        value = [value]
    return value


VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from((*NUMBERS, *TEXTS, *PROMPTS)),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from((*TEXTS, *FIELDS)), inner, max_size=4)
    ),
    max_leaves=10,
)


@st.composite
def requests(draw):
    """A path and a body for it, as bytes."""
    path = draw(st.sampled_from(list(GOOD)))
    large = VALUES.map(deep) | VALUES.map(lambda value: [value] * 1000)
    changed = draw(st.dictionaries(st.sampled_from(FIELDS), VALUES | large, max_size=3))
    body = {**GOOD[path], **changed} if draw(st.integers(0, 4)) else draw(VALUES)
    content = json.dumps(body).encode()[: 2**20]
    place = draw(st.integers(0, 8 * len(content)))  # mostly beyond the end
    if place < len(content):  # torn, or with a byte that does not belong there
        content = content[:place] + draw(st.sampled_from((b"", b"\xff", b'"', b"{")))
    return path, content


@settings(
    max_examples=10_000 if STORM else 200,
    derandomize=not STORM,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(requests())
def test_random_bodies_get_an_answer_and_harm_nobody(m4, request_):
    path, body = request_
    with m4.connect() as connection:
        connection.sendall(http_request("POST", path, body))
        status, _, text = read_answer(connection)
    if status != 200:
        assert 400 <= status < 500 or status == 504, text
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert len(text) < 2000


def test_afterwards_nothing_is_left_of_them(m4):
    assert m4.fetch("POST", "/v1/completions", GOOD["/v1/completions"])[0] == 200
    m4.wait_until_idle()
    assert "Traceback" not in m4.log.read_text()
