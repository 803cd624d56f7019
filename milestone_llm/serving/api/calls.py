"""Calls of functions: the grammar that makes a model write them, and the reader that finds them,
and finds thoughts between `<think>` and `</think>`.

The model writes a call in the form of its chat template (`CallForm`), or in a general one. If the
choice is its own ("auto"), the grammar has two branches, words or calls. A form with a mark, such
as `<tool_call>`, is known by it, after any words. Other forms begin with "{", as the answer does.
From there on the arguments follow the function's schema. So the reader needs no guesses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from milestone_llm.models.call_form import CallForm, added_tokens, call_form, shown_text

BEGIN_OF_THOUGHTS, END_OF_THOUGHTS = "<think>", "</think>"
Thoughts = Literal["none", "possible", "begun"]
"""Whether an answer may begin with thoughts, and whether the prompt has their beginning."""

_NAME = r"([a-zA-Z0-9_-]{1,64})"
_BRACKETS = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


class CallWriting:
    """How one model writes calls.

    Args:
        tokenizer: the model's; None: it has none.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any = None, eos_token_ids: Sequence[int] = ()) -> None:
        form = call_form(tokenizer)
        self.is_general = form is None
        """Whether the chat template has no form of its own, so that it is not given the tools."""
        self.form = form or CallForm()
        added = added_tokens(tokenizer)
        self._ids = {token.content: token_id for token_id, token in added.items()}
        self._visible = [
            token_id
            for token_id, token in added.items()
            if not token.special and token_id not in eos_token_ids
        ]
        pieces = (self.form.begin.lstrip(), self.form.middle, self.form.between or "")
        shown = [shown_text(piece, tokenizer) for piece in pieces]
        self.has_hidden = shown != [*pieces]
        """Whether the form has special tokens. It is read in text that leaves them out."""
        self.begin, self.middle, self.between = shown
        self.begin = self.begin.lstrip()
        self.has_mark = self.form.has_mark and not self.begin.startswith("{")
        self.mark = re.match(r"\S+", self.begin)[0] if self.has_mark else "{"  # type: ignore[index]

    def grammar(
        self,
        functions: Sequence[tuple[str, dict[str, Any]]],
        is_required: bool,
        is_parallel: bool,
        words_schema: Any = None,
    ) -> str:
        """Return a grammar in Lark's notation.

        Args:
            functions: names, and schemas of their arguments.
            is_required: whether the answer has to be a call; else it may be words.
            is_parallel: whether an answer may have several calls, if the form can say so.
            words_schema: JSON schema of the words; None: they are free.
        """
        form = self.form
        # Each schema has a root of its own, to which its `$ref` refer.
        calls = " | ".join(
            f"{self._lark(name + form.middle)} %json {json.dumps(schema)}"
            for name, schema in functions
        )
        more = f"({self._lark(form.between)} call)*" if is_parallel and form.between else ""
        rules = [f"call: {calls}", f"calls: call {more} {self._lark(form.end)}"]
        begin = self._lark(form.begin.lstrip())
        if is_required:
            return "\n".join([f"start: {begin} calls", *rules])
        if words_schema is not None:
            return "\n".join([f"start: %json {json.dumps(words_schema)} | {begin} calls", *rules])
        names = f"<[{','.join(map(str, sorted(set(self._visible) - self._mark_ids)))}]>"
        names = "" if names == "<[]>" else names
        if not self.has_mark:
            first = r"FIRST: /\s*[^{\s](.|\n)*|\s+/"
            more = f"({names} TEXT?)*" if names else ""
            start = [f"start: FIRST? {more} | BLANKS? {begin} calls", first, r"BLANKS: /\s+/"]
            return "\n".join([*start, *rules, r"TEXT: /(.|\n)+/" if names else ""])
        before = f"(TEXT? {names})*" if names else ""
        spelled = self.begin.removeprefix(self.mark)
        marked = f"trigger {_quoted(spelled)}" if spelled else "trigger"
        if self._mark_ids:
            marked = f"TEXT? {begin} | {marked}"
        mark = re.escape(self.mark).replace("/", r"\/")
        start = [f"start: {before} (TEXT? | marked calls)", f"marked: {marked}"]
        return "\n".join([*start, rf"trigger[lazy]: /(.|\n)*{mark}/", r"TEXT: /(.|\n)+/", *rules])

    @property
    def _mark_ids(self) -> set[int]:
        return {token_id for name, token_id in self._ids.items() if name in self.form.begin}

    def _lark(self, text: str) -> str:
        """Return a text of the template in Lark's notation. Names of tokens mean the tokens."""
        names = "|".join(re.escape(name) for name in sorted(self._ids, key=len, reverse=True))
        parts = re.split(f"({names})", text) if names else [text]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part)
            for part in parts
            if part
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def knows_thoughts(tokenizer: Any) -> bool:
    """Return whether a chat template has the marks of thoughts, and an output's text shows them."""
    template = str(getattr(tokenizer, "chat_template", None))
    is_hidden = any(
        token.special and token.content == END_OF_THOUGHTS
        for token in added_tokens(tokenizer).values()
    )
    return END_OF_THOUGHTS in template and not is_hidden


class AnswerPart(NamedTuple):
    """Something new in an answer: thoughts, words, or a part of a call."""

    words: str = ""
    thoughts: str = ""
    call: int | None = None
    """Place of the call in the answer; None: this is no part of a call."""
    name: str | None = None
    """Name of the function, in the first part of a call."""
    arguments: str = ""


@dataclass
class AnswerReader:
    """Reads one answer while it grows.

    Args:
        writing: how the model writes calls.
        has_words: whether free words may come before a call. Else a call is at the beginning.
        has_calls: whether there may be calls.
        thoughts: whether it may begin with thoughts.
    """

    writing: CallWriting
    has_words: bool
    has_calls: bool = True
    thoughts: Thoughts = "none"
    num_calls: int = 0
    """Calls whose names have been read."""
    is_complete: bool = False
    """Whether the arguments of the last call are complete."""
    _at: int = 0
    _state: Literal["begin", "thoughts", "words", "name", "arguments"] = "words"
    _has_begun: bool = False
    """Whether something has been read, so that a form without a mark can be no call any more."""
    _depth: int = 0
    _in_string: bool = False
    _skips_blanks: bool = False

    def read(self, text: str, is_ended: bool) -> list[AnswerPart]:
        """Return what is new in a text. It begins with the text of the last time.

        Args:
            is_ended: whether the text is complete. If not, words are held back that may be the
                beginning of a call.
        """
        parts: list[AnswerPart] = []
        if self._state == "begin":
            self._look_for_thoughts(text, is_ended)
        is_call = self.has_calls and not self.writing.has_mark and text.lstrip().startswith("{")
        if self._state == "thoughts" and is_call:  # though the prompt has begun thoughts
            self._state = "words"
        if self._state == "thoughts":
            parts += self._read_thoughts(text, is_ended)
        if self._state == "words":
            parts += self._read_words(text, is_ended)
        while self._state in ("name", "arguments"):
            if self._state == "name":
                begin = self.writing.between if self.num_calls else self.writing.begin
                form = re.escape(begin) + _NAME + re.escape(self.writing.middle)
                if (found := re.compile(form).match(text, self._at)) is None:
                    break
                self._at, self._state = found.end(), "arguments"
                self._depth, self.is_complete = 0, False
                self.num_calls += 1
                parts.append(AnswerPart(call=self.num_calls - 1, name=found[1]))
            start = self._at
            self._read_arguments(text)
            if self._at > start:
                arguments = text[start : self._at]
                parts.append(AnswerPart(call=self.num_calls - 1, arguments=arguments))
            if self._state == "arguments":
                break
        return _joined(parts)

    def __post_init__(self) -> None:
        if self.thoughts != "none":
            self._state = "thoughts" if self.thoughts == "begun" else "begin"

    def _look_for_thoughts(self, text: str, is_ended: bool) -> None:
        begins = text.lstrip()
        if begins.startswith(BEGIN_OF_THOUGHTS):
            self._at, self._state = len(text) - len(begins) + len(BEGIN_OF_THOUGHTS), "thoughts"
        elif is_ended or not BEGIN_OF_THOUGHTS.startswith(begins):
            self._state = "words"

    def _read_thoughts(self, text: str, is_ended: bool) -> list[AnswerPart]:
        if not self._has_begun:
            self._at = len(text) - len(text[self._at :].lstrip())
        marks = [END_OF_THOUGHTS, *([self.writing.mark] if self._finds_marks else [])]
        end, mark = self._words_end(text, marks, is_ended)
        thoughts = text[self._at : end]
        if mark or not is_ended:
            thoughts = thoughts.rstrip()
        self._has_begun = self._has_begun or bool(mark or thoughts)
        self._at = end if mark else self._at + len(thoughts)
        if mark:
            self._state = "words"
        if mark == END_OF_THOUGHTS:
            self._at += len(mark)
            self._skips_blanks = True
        return [AnswerPart(thoughts=thoughts)] if thoughts else []

    def _read_words(self, text: str, is_ended: bool) -> list[AnswerPart]:
        if self._skips_blanks:
            self._at = len(text) - len(text[self._at :].lstrip())
            self._skips_blanks = self._at == len(text)
        if self._finds_marks:
            end, mark = self._words_end(text, [self.writing.mark], is_ended)
        elif self._has_begun or not self.has_calls:
            end, mark = len(text), ""
        else:
            begins = text[self._at :].lstrip()
            mark = self.writing.mark if begins.startswith(self.writing.mark) else ""
            if not mark and not is_ended and self.writing.mark.startswith(begins):
                return []  # it may still be a call
            end = len(text) - len(begins) if mark else len(text)
        words = text[self._at : end]
        if mark or (self.has_calls and not is_ended):  # blanks before a call are no words
            words = words.rstrip()
        self._has_begun = self._has_begun or bool(mark or words)
        self._at = end if mark else self._at + len(words)
        if mark:
            self._state = "name"
        return [AnswerPart(words)] if words else []

    @property
    def _finds_marks(self) -> bool:
        """Whether a call may come after words."""
        return self.has_calls and self.has_words and self.writing.has_mark

    def _words_end(self, text: str, marks: list[str], is_ended: bool) -> tuple[int, str]:
        """Return where thoughts or words end, and the mark that ends them; "" if there is none
        yet."""
        found = [(place, mark) for mark in marks if (place := text.find(mark, self._at)) >= 0]
        held = 0 if is_ended else max(_num_held(text[self._at :], mark) for mark in marks)
        return min(found, default=(len(text) - held, ""))

    def _read_arguments(self, text: str) -> None:
        """Go on to the end of a JSON object, which may be nested to any depth."""
        while self._at < len(text):
            if self._in_string:
                found = _IN_STRING.match(text, self._at)
                assert found is not None
                self._at = found.end()
                if text[self._at : self._at + 1] != '"':
                    break  # half of an escape may be left
                self._at, self._in_string = self._at + 1, False
                continue
            if (bracket := _BRACKETS.search(text, self._at)) is None:
                self._at = len(text)
                break
            self._at = bracket.end()
            if bracket[0] == '"':
                self._in_string = True
            else:
                self._depth += 1 if bracket[0] in "{[" else -1
            if self._depth == 0 and not self._in_string:
                self._state, self.is_complete = "name", True
                break


def _joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    """Join the name of a call with the arguments that follow it."""
    joined: list[AnswerPart] = []
    for part in parts:
        if joined and part.call is not None and part.call == joined[-1].call:
            last = joined[-1]
            joined[-1] = last._replace(arguments=last.arguments + part.arguments)
        else:
            joined.append(part)
    return joined


def _num_held(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
