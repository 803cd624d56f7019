"""Whether a grammar has a text that ends. `start: "a" start` has none: each rule needs another.

A rule can end if one of its alternatives can, and an alternative if all its parts can. These facts
follow from one another, from the texts and regexes on: those that never follow are rules without
end (which symbols of a context-free grammar are *productive*; Hopcroft and Ullman, section 4.4).
It takes time in proportion to the grammar's length.

What only numbers say is not looked at: `minProperties`, two patterns that exclude each other. Nor
are grammars with parts of Lark's notation that are not known here. Those are taken, and may run to
`max_tokens`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\f]+|(?://|\#)[^\n]*)
    |(?P<line>\s+)
    |(?P<text>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[a-z]*|<[^<>\s]+>)
    |(?P<name>%?[A-Za-z_](?:\w|-(?!>))*)
    |(?P<number>\d+)
    |(?P<sign>\.\.|->|.)""",
    re.VERBOSE,
)
Tokens = list[tuple[str, str]]
"""Kinds and texts; a schema after `%json` is a `text`."""


def schema_can_end(root: Any) -> bool:
    """Return whether some text matches a JSON schema; True as well if it is malformed."""
    try:
        facts = _Facts()
        return facts.follows(_add_schema(root, facts))
    except (AttributeError, TypeError):
        return True


def _add_schema(root: Any, facts: _Facts) -> int:
    """Add a schema, with all that it refers to. Return its node."""
    nodes: dict[int, int] = {}
    left: list[dict[str, Any]] = []

    def node_of(schema: Any) -> int:
        if not isinstance(schema, dict):
            return facts.any_of([]) if schema is False else facts.all_of([])
        if id(schema) not in nodes:
            nodes[id(schema)] = facts.any_of([])
            left.append(schema)
        return nodes[id(schema)]

    answer = node_of(root)
    while left:
        schema = left.pop()
        parts = [node_of(each) for each in schema.get("allOf", ())]
        for key in schema.keys() & {"anyOf", "oneOf"}:
            parts.append(facts.any_of([node_of(each) for each in schema[key]]))
        if "$ref" in schema:
            parts.append(node_of(_target(root, schema["$ref"])))
        if not schema.keys() & {"const", "enum"}:
            needed = {"object": _required(schema), "array": _first_items(schema)}
            kinds = schema.get("type", "any")
            of_kinds = [
                facts.all_of([node_of(each) for each in needed.get(kind, ())])
                for kind in (kinds if isinstance(kinds, list) else [kinds])
            ]
            parts.append(facts.any_of(of_kinds))
        facts.link([facts.all_of(parts)], nodes[id(schema)])
    return answer


def _target(root: Any, reference: Any) -> Any:
    """Return the schema that a `$ref` means; True, which can end, if it is not found."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return True
    found = root
    for part in reference[2:].split("/") if len(reference) > 1 else ():
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(key, True) if isinstance(found, dict) else True
    return found


def _required(schema: dict[str, Any]) -> list[Any]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if "patternProperties" in schema:
        others = True
    return [properties.get(name, others) for name in schema.get("required", ())]


def _first_items(schema: dict[str, Any]) -> list[Any]:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    return [*first[:least], schema.get("items", True)] if least > len(first) else first[:least]


def lark_can_end(lark: str) -> bool:
    """Return whether some text matches a grammar in Lark's notation. A schema in it is taken to
    match some."""
    facts = _Facts()
    try:
        return facts.follows(_LarkRules(_tokens(lark), facts).node_of("start"))
    except _UnknownNotationError:
        return True


class _UnknownNotationError(Exception):
    pass


class _Facts:
    """Facts that follow from other facts: a node from all of its children, or from any of them."""

    def __init__(self) -> None:
        self._missing: list[int] = []
        """Children of a node that have to follow first."""
        self._parents: list[list[int]] = []

    def all_of(self, children: Iterable[int]) -> int:
        """Return a new node that follows from all children; without children, it always does."""
        children = list(children)
        return self._node(len(children), children)

    def any_of(self, children: Iterable[int]) -> int:
        """Return a new node that follows from any child."""
        return self._node(1, children)

    def link(self, children: Iterable[int], node: int) -> None:
        """Give a node more children."""
        for child in children:
            self._parents[child].append(node)

    def follows(self, node: int) -> bool:
        """Return whether a node follows. It is asked once."""
        ready = [each for each, missing in enumerate(self._missing) if missing == 0]
        while ready:
            for parent in self._parents[ready.pop()]:
                self._missing[parent] -= 1
                if self._missing[parent] == 0:
                    ready.append(parent)
        return self._missing[node] <= 0

    def _node(self, num_missing: int, children: Iterable[int]) -> int:
        self._missing.append(num_missing)
        self._parents.append([])
        node = len(self._missing) - 1
        self.link(children, node)
        return node


def _tokens(lark: str) -> Tokens:
    tokens: Tokens = []
    end = 0
    while (found := _TOKEN.match(lark, end)) is not None:
        kind, text, end = str(found.lastgroup), found[0], found.end()
        if text == "%json":
            _, end = json.JSONDecoder().raw_decode(lark, end + 1)
            kind = "text"
        if kind != "skip":
            tokens.append((kind, text))
    return tokens


class _LarkRules:
    """Reads the rules of a grammar into facts: the node of a rule follows if the rule can end."""

    def __init__(self, tokens: Tokens, facts: _Facts) -> None:
        self._tokens, self._facts = tokens, facts
        self._at = 0
        self._nodes: dict[str, int] = {}
        while self._at < len(self._tokens):
            self._read_statement()

    def node_of(self, name: str) -> int:
        """Return the node of a rule. A terminal, in capitals, is a regex: it can end."""
        if name not in self._nodes:
            facts = self._facts
            self._nodes[name] = facts.all_of([]) if name.isupper() else facts.any_of([])
        return self._nodes[name]

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ("line", "\n")

    def _take(self, text: str) -> bool:
        is_there = self._peek()[1] == text
        self._at += is_there
        return is_there

    def _read_statement(self) -> None:
        while self._peek()[1] in "?!":
            self._at += 1
        kind, name = self._peek()
        if kind == "line":
            self._at += 1
            return
        if kind != "name":
            raise _UnknownNotationError
        self._at += 1
        if name.startswith("%") or name.isupper():  # a directive, or a terminal
            self._skip_statement()
            return
        if self._take("["):  # attributes
            while self._peek()[0] != "line" and not self._take("]"):
                self._at += 1
        if not self._take(":"):
            raise _UnknownNotationError
        self._facts.link([self._alternatives()], self.node_of(name))
        if self._peek()[0] != "line":
            raise _UnknownNotationError

    def _skip_statement(self) -> None:
        depth = 0
        while self._peek()[0] != "line" or depth or self._peek(1)[1] == "|":
            depth += {"{": 1, "}": -1}.get(self._peek()[1], 0)
            self._at += 1
            if self._at >= len(self._tokens):
                return

    def _alternatives(self) -> int:
        found = [self._sequence()]
        while True:
            if self._peek()[0] == "line" and self._peek(1)[1] == "|":
                self._at += 1
            if not self._take("|"):
                return self._facts.any_of(found)
            found.append(self._sequence())

    def _sequence(self) -> int:
        parts = []
        while self._peek()[0] != "line" and self._peek()[1] not in "|)]":
            if self._take("->"):  # a name for this alternative
                self._at += 1
            else:
                parts.append(self._repeated(self._part()))
        return self._facts.all_of(parts)

    def _part(self) -> int:
        kind, text = self._peek()
        self._at += 1
        if kind == "text":
            if self._take(".."):
                self._at += 1
            return self._facts.all_of([])
        if kind == "name" and not text.startswith("%"):
            return self.node_of(text)
        if text not in "([":
            raise _UnknownNotationError
        inner = self._alternatives()
        if not self._take(")" if text == "(" else "]"):
            raise _UnknownNotationError
        return inner if text == "(" else self._facts.all_of([])

    def _repeated(self, part: int) -> int:
        """Return the node of a part with what is said of its number."""
        least = 1
        if self._take("?") or self._take("*"):
            least = 0
        elif self._take("~") or self._take("{"):
            kind, number = self._peek()
            least = int(number) if kind == "number" else 0
            while self._peek()[0] == "number" or self._peek()[1] in ",..}":
                self._at += 1
        else:
            self._take("+")
        return part if least else self._facts.all_of([])
