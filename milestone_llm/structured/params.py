"""Constraints on an output's text. Names are vLLM's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from milestone_llm.core.errors import InputError

MAX_LENGTH = 100_000
"""Most characters of a schema, regex or grammar."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A constraint: exactly one of these five fields is given.

    Raises:
        InputError: none or several are given, or one has a wrong type or is too long.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as text or as a value."""
    regex: str | None = None
    """A regular expression that matches the whole output."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A grammar in the notation of Lark or of GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value not in (None, False)}
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            got = ", ".join(given) or "none"
            raise InputError(f"structured outputs want exactly one of {names}, got {got}")
        ((name, value),) = given.items()
        if name == "choice":
            is_list = isinstance(value, Iterable) and not isinstance(value, str)
            texts = tuple(value) if is_list else ()
            if not texts or not all(isinstance(each, str) and each for each in texts):
                raise InputError(f"choice must be a list of texts, got {value!r:.200}")
            object.__setattr__(self, name, texts)
        elif name == "json":
            object.__setattr__(self, name, _schema(value))
        elif name != "json_object" and not isinstance(value, str):
            raise InputError(f"{name} must be a text, got {value!r:.200}")
        try:
            json.dumps(getattr(self, name), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{name} has text that is not Unicode: {error}") from None
        length = len(json.dumps(getattr(self, name)))
        if length > MAX_LENGTH:
            raise InputError(f"{name} has {length:,} characters; at most {MAX_LENGTH:,} are taken")

    @property
    def key(self) -> str:
        """A text that is equal for equal constraints."""
        return json.dumps(vars(self), sort_keys=True)


def unique_names(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON as a dict: an `object_pairs_hook`.

    Raises:
        InputError: it has a name twice. Parsers differ in which of the two values they take.
    """
    values = dict(members)
    if len(values) < len(members):
        (twice, _), *_ = Counter(name for name, _ in members).most_common(1)
        raise InputError(f"an object has the name {twice!r:.100} twice")
    return values


def _schema(value: Any) -> str:
    """Return a JSON schema as text.

    Raises:
        InputError: it is not a JSON schema.
    """
    try:
        is_text = isinstance(value, str)
        schema = json.loads(value, object_pairs_hook=unique_names) if is_text else value
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"json is no JSON schema: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InputError(f"json must be a JSON schema, got {value!r:.200}")
    return text
