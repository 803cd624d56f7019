"""An agent: a loop in which a model calls functions, and reads their results. To run it:

    make serve                               in another terminal
    python -m milestone_llm.lab.agent

Each turn sends the whole conversation. What is printed is how much of it the server has found in
its prefix cache. With --stamp the system prompt changes with each turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

SYSTEM = "You help the visitors of a library. Call a function to find out what you do not know."
QUESTION = "Is the library open on Sunday, and where are the books about birds?"
SHELVES = {"birds": "shelf 12", "boats": "shelf 7", "bread": "shelf 3"}
FUNCTIONS: dict[str, Callable[..., str]] = {
    "opening_hours": lambda day: "closed" if day == "Sunday" else "9 to 18 o'clock",
    "find_books": lambda subject: SHELVES[subject],
}
"""The agent's own functions, by name."""


def tool(name: str, description: str, argument: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return how a function with one argument is described to a model."""
    schema: dict[str, Any] = {"type": "object", "properties": {argument: values}}
    schema |= {"required": [argument], "additionalProperties": False}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("opening_hours", "When the library is open.", "day", {"enum": ["Friday", "Sunday"]}),
    tool("find_books", "Where books about a subject are.", "subject", {"enum": [*SHELVES]}),
    tool("answer", "Tells the visitor the answer.", "text", {"type": "string", "maxLength": 120}),
]


def allowed(names: Sequence[str]) -> dict[str, Any]:
    """Return the choice of one of these functions. The model is shown all of them, in each turn the
    same."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}


def run_agent(client: Any, model: str, is_stamped: bool = False) -> str:
    """Let a model call each function once, in an order of its own, and then call `answer`.

    Args:
        client: OpenAI's.
        is_stamped: whether the system prompt begins with the number of the turn.
    """
    messages: list[Any] = [{"role": "system"}, {"role": "user", "content": QUESTION}]
    left = list(FUNCTIONS)
    while True:
        messages[0]["content"] = f"Turn {len(messages) // 2}. " * is_stamped + SYSTEM
        choice = allowed(left or ["answer"])
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, temperature=0
        )
        message, usage = answer.choices[0].message, answer.usage
        num_cached = usage.prompt_tokens_details.cached_tokens
        print(f"{usage.prompt_tokens} tokens of prompt, {num_cached} of them cached")
        (call,) = message.tool_calls
        name, arguments = call.function.name, json.loads(call.function.arguments)
        if name == "answer":
            return str(arguments["text"])
        result = FUNCTIONS[name](**arguments)
        print(f"  {name}({arguments}) -> {result}")
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        left.remove(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--stamp", action="store_true", help="change the system prompt each turn")
    args = parser.parse_args(arguments)
    from openai import OpenAI

    client = OpenAI(base_url=f"{args.url}/v1", api_key="none", max_retries=0)
    print("  " + run_agent(client, client.models.list().data[0].id, args.stamp))


if __name__ == "__main__":
    main()
