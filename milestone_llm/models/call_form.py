"""The form in which a model writes calls of functions, read from its chat template.

Each family of models has a form of its own. The template knows it, since it writes the calls of
earlier turns. So one conversation with two calls is rendered, and what is written around their
names and arguments is the form. No family needs a parser:

    Qwen, Hermes   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
    Llama 3        {"name": "f", "parameters": {...}}
    Mistral        [TOOL_CALLS] [{"name": "f", "arguments": {...}}, {"name": ...}]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMES = "Name1kraM", "Name2kraM"
_ARGUMENT = "Mark3kraM"
_IDS = "call00001", "call00002"  # Mistral's have nine characters
_ARGUMENTS = re.compile(rf'\{{\s*"{_ARGUMENT}"\s*:\s*"{_ARGUMENT}"\s*\}}')
_ID = re.compile(rf',\s*"id"\s*:\s*"(?:{"|".join(_IDS)})"')
_THOUGHTS = r"<think>\s*(?:</think>\s*)?"


@dataclass(frozen=True)
class CallForm:
    """What is written around the names and arguments of calls. The defaults are the form for models
    whose template has none."""

    begin: str = '{"name": "'
    """Before the first call's name."""
    middle: str = '", "arguments": '
    """Between a name and its arguments, which are JSON."""
    between: str | None = '}\n{"name": "'
    """Between the arguments of a call and the next name; None: an answer has one call."""
    end: str = "}"
    """After the last call's arguments."""

    @property
    def has_mark(self) -> bool:
        """Whether a call is known by its first word. Other forms begin as any JSON object does."""
        return not self.begin.lstrip().startswith("{")


def call_form(tokenizer: PreTrainedTokenizerBase | None) -> CallForm | None:
    """Return the form in which a chat template writes calls.

    Returns:
        None if there is no template, if it shows no calls, or if they cannot be told from its text:
        their arguments are no JSON, or all that marks them is hidden from the output's text.
    """
    if tokenizer is None or not tokenizer.chat_template:
        return None
    for num_calls in (2, 1):
        try:
            form = _form(tokenizer, num_calls)
        except Exception:  # a template's code may raise anything, and some refuse two calls
            continue
        if form is not None and _is_readable(form, tokenizer):
            return form
    return None


def shown_text(text: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a text of a chat template as it is in an output: special tokens are not."""
    for token in added_tokens(tokenizer).values():
        if token.special:
            text = text.replace(token.content, "")
    return text


def added_tokens(tokenizer: PreTrainedTokenizerBase | None) -> dict[int, Any]:
    """Return the tokens that have a name, such as `<tool_call>`, by id."""
    return {} if tokenizer is None else dict(tokenizer.added_tokens_decoder)


def _form(tokenizer: PreTrainedTokenizerBase, num_calls: int) -> CallForm | None:
    user = {"role": "user", "content": "Question"}
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": {_ARGUMENT: _ARGUMENT}},
        }
        for call_id, name in zip(_IDS[:num_calls], _NAMES, strict=False)
    ]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [
        {"role": "tool", "name": name, "tool_call_id": call_id, "content": "Result"}
        for call_id, name in zip(_IDS[:num_calls], _NAMES, strict=False)
    ]
    opened = _rendered(tokenizer, [user], True)
    text = _rendered(tokenizer, [user, called, *results], False)
    if not text.startswith(opened):  # the template begins the model's thoughts
        opened = re.sub(f"{_THOUGHTS}$", "", opened)
        if not text.startswith(opened):
            return None
    text = re.sub(rf"^\s*{_THOUGHTS}", "", text[len(opened) :])
    begin, name, rest = text.partition(_NAMES[0])
    parts = _ARGUMENTS.split(rest)
    if not name or len(parts) != num_calls + 1:
        return None
    middle, *betweens, after = parts
    between = None
    if betweens:
        between, name, other_middle = betweens[0].partition(_NAMES[1])
        between = _ID.sub("", between)
        if not name or other_middle != middle:
            return None
    end, is_end, _ = _ID.sub("", after).partition(_end_of_turn(tokenizer, user))
    return CallForm(begin, middle, between, end) if is_end else None


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, user: dict[str, str]) -> str:
    """Return the token with which the template ends an answer.

    Raises:
        ValueError: it ends with none.
    """
    answer = {"role": "assistant", "content": "Words"}
    text = _rendered(tokenizer, [user, answer, user], False).rpartition("Words")[2].lstrip()
    names = [token.content for token in added_tokens(tokenizer).values()]
    return max((name for name in names if text.startswith(name)), key=len)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Any], is_open: bool) -> str:
    no_parameters = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "A function.", "parameters": no_parameters}
    text = tokenizer.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=is_open,
        tokenize=False,
    )
    return str(text)


def _is_readable(form: CallForm, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether calls can be told from the text of an output."""
    pieces = [form.begin, form.middle, *([form.between] if form.between else [])]
    shown = [shown_text(piece, tokenizer) for piece in pieces]
    has_ids = any(call_id in piece for piece in (*pieces, form.end) for call_id in _IDS)
    return all(map(str.strip, shown)) and not has_ids and not re.match(r"[\w-]", shown[1])
