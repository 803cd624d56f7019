"""The agent's loop, with a client that answers from a list."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from milestone_llm.lab.agent import TOOLS, run_agent

CALLS = [
    ("find_books", {"subject": "boats"}),
    ("opening_hours", {"day": "Sunday"}),
    ("answer", {"text": "Shelf 7, but not on Sunday."}),
]


class Message(SimpleNamespace):
    def model_dump(self, exclude_none: bool) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [self.tool_calls[0].id]}


@pytest.mark.parametrize("is_stamped", [False, True])
def test_an_agent_sends_the_whole_conversation_and_calls_each_function_once(is_stamped):
    asked: list[dict[str, Any]] = []

    def create(**fields: Any) -> Any:
        asked.append(json.loads(json.dumps(fields)))
        name, arguments = CALLS[len(asked) - 1]
        function = SimpleNamespace(name=name, arguments=json.dumps(arguments))
        message = Message(tool_calls=[SimpleNamespace(id=name, function=function)])
        details = SimpleNamespace(cached_tokens=0)
        usage = SimpleNamespace(prompt_tokens=9, prompt_tokens_details=details)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage)

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    assert run_agent(client, "m", is_stamped) == "Shelf 7, but not on Sunday."
    first, second, third = (each["messages"] for each in asked)
    assert (second[: len(first)] == first) is not is_stamped
    assert [each.get("content") for each in third[2:]] == [None, "shelf 7", None, "closed"]
    allowed = [each["tool_choice"]["allowed_tools"]["tools"] for each in asked]
    assert [[tool["function"]["name"] for tool in tools] for tools in allowed] == [
        ["opening_hours", "find_books"],
        ["opening_hours"],
        ["answer"],
    ]
    assert all(each["tools"] == TOOLS for each in asked)
