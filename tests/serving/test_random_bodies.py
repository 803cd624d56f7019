"""Random bodies, most of them wrong: each gets 200 or an error in OpenAI's words, and harms nobody.

`make storm` sends many more, with fresh seeds; a find names the seed and the number of its body.
"""

import json
import os
import random

import pytest

from milestone_llm.serving.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from serving_helpers import http_request, read_answer

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
STORM = bool(os.environ.get("STORM"))
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # all processes of a run collect the same tests
SEEDS = random.Random(RUN).sample(range(10**6), 8) if STORM else [18, 21]
NUM_BODIES = 1500 if STORM else 120
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
FIELDS += ["tools", "response_format", "logit_bias", "metadata", "best_of", "no_such_field"]
WORDS = ["", "a", "role", "content", "text", "type", "user", "\ud800", "\U0001f600", "</s>", "\0"]


class Bodies:
    """Makes bodies, as bytes. All comes from the seed."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def next(self):
        """A path and a body for it."""
        rng = self.rng
        path = rng.choice(PATHS)
        body = dict(GOOD[path])
        for _ in range(rng.choice((0, 0, 1, 3))):
            body[rng.choice(FIELDS)] = self.value()
        for _ in range(rng.choice((0, 1))):
            body = self.changed(body)
        if rng.random() < 0.2:
            body = self.value()
        content = json.dumps(body).encode()
        if rng.random() < 0.15:  # torn, or with a byte that does not belong there
            place = rng.randrange(len(content))
            content = content[:place] + rng.choice((b"", b"\xff", b'"', b"{", content[:9]))
        elif rng.random() < 0.1:  # a field twice
            content = content[:-1] + b', "prompt": [1, "b"], "prompt": 5}'
        return path, content[: 2**20]  # what is larger is torn

    def changed(self, data):
        """The same with another value at some place within it."""
        rng = self.rng
        if isinstance(data, str) and rng.random() < 0.5:
            return rng.choice(("", "\ud800", "a\udfff", "\0", "a" * 5000))
        if rng.random() < 0.1 or not isinstance(data, dict | list) or not data:
            return self.value()
        place = rng.choice(list(data) if isinstance(data, dict) else range(len(data)))
        data = data.copy()
        data[place] = self.changed(data[place])
        return data

    def value(self, depth=0):
        """Anything that JSON can say, and some that it cannot."""
        rng = self.rng
        kind = rng.randrange(9 if depth < 4 else 6)
        if kind == 0:
            return rng.choice((None, True, False))
        if kind == 1:
            return rng.choice((0, 1, 2, 5, -1, 40, 300, 2**31, 2**63, -(2**63), 10**400))
        if kind == 2:
            return rng.choice((0.0, 0.5, 1.5, -1.0, 1e-300, 1e300, float("nan"), float("inf")))
        if kind in (3, 4):
            return rng.choice(WORDS) * rng.choice((1, 1, 1, 3, 300, 5000))
        if kind == 5:
            return rng.choice(([HELLO], [{**HELLO, "x": [1]}], [40, 41], ["a", "b"], [[40], [41]]))
        if kind == 6:
            return [self.value(depth + 1) for _ in range(rng.choice((0, 1, 2, 5)))]
        if kind == 7:
            names = [rng.choice(WORDS + FIELDS) for _ in range(rng.randrange(5))]
            return {name: self.value(depth + 1) for name in names}
        nested = self.value(depth + 1)
        for _ in range(rng.choice((1, 50, 230))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return [nested] * rng.choice((1, 1000)) if depth == 0 else nested


def assert_is_refusal(status, text):
    """OpenAI's shape: `{"error": {message, type, param, code}}`."""
    assert 400 <= status < 500 or status == 504, text
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(text) < 2000


@pytest.mark.parametrize("seed", SEEDS)
def test_random_bodies_get_an_answer_and_harm_nobody(m4, seed):
    bodies, statuses = Bodies(seed), set()
    for number in range(NUM_BODIES):
        path, body = bodies.next()
        with m4.connect() as connection:
            connection.sendall(http_request("POST", path, body))
            status, _, text = read_answer(connection)
        statuses.add(status)
        try:
            if status != 200:
                assert_is_refusal(status, text)
        except (AssertionError, ValueError) as error:
            of_which = f"body {number} of seed {seed}: {path} {body[:300]!r}: {status}"
            raise AssertionError(of_which) from error
        if number % 50 == 0:
            assert m4.fetch("POST", PATHS[0], GOOD[PATHS[0]])[0] == 200
    assert {200, 400} <= statuses
    m4.wait_until_idle()
    assert "Traceback" not in m4.log.read_text()
