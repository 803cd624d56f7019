"""Carries questions to the playground in a browser, as `server.py` does on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable

from milestone_llm.lab.playground.service import Playground


def carrier() -> Callable[[str, str], tuple[bool, str]]:
    """A function from path and JSON to whether it went well, and the answer or what is wrong."""
    answers = Playground().answers

    def answer(path: str, body: str) -> tuple[bool, str]:
        try:
            return True, answers[path](json.loads(body))
        except (ValueError, RecursionError) as error:  # bad input, no JSON, too long a number
            return False, str(error)

    return answer
