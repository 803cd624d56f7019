"""The text that llguidance compiles, made from a request's `StructuredOutputsParams`.

JSON schemas are changed on the way. Blanks between two tokens of JSON are limited, since a model
may otherwise write them until `max_tokens`. What would explode is refused. And where a schema says
`"x-guidance": {"lenient": true}`, patterns that llguidance cannot compile are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from milestone_llm.core.errors import InputError
from milestone_llm.core.unknown_names import refuse_unknown

from .endings import lark_can_end, schema_can_end
from .params import StructuredOutputsParams, unique_names

MAX_BLANKS = 32
"""Most spaces, tabs and line ends between two tokens of JSON. It is enough for a line end, and for
15 levels of indentation by two spaces."""
MAX_REMAINDERS = 50_000
"""Most remainders that the grammar of a schema with `multipleOf` may have to tell apart. So many
take half a second."""
LARGEST_EXACT = 2**53
"""Largest whole number that llguidance keeps: it reads numbers as floats of 64 bits. It makes
others of larger ones, and some bounds end the process."""

_BLANKS = rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}"
_ESCAPES = 'nrbtf\\"'
"""Escapes of JSON that texts may have: not `u`. With it llguidance takes the name "\\u0061" for
another one than "a", with a schema of its own."""
_NEED_U = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that llguidance writes with the escape `u` alone."""
_COMBINES = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
"""Keys by which several `multipleOf` may become one, of their least common multiple."""
_UPPER_BOUNDS = {"maximum", "exclusiveMaximum"}
_BOUNDS = {"minimum", "exclusiveMinimum", *_UPPER_BOUNDS}
_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
"""Keys whose values are schemas by name."""
_NO_SCHEMAS = {"const", "enum", "default", "examples", "x-guidance"}
_OPTIONS = ("lenient", "whitespace_flexible", "whitespace_pattern")
"""Options of llguidance that a schema may set with `x-guidance`. Others would allow texts that the
schema does not."""
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|%json')
"""Texts, comments and regexes of Lark's notation, in which `%json` means nothing; and `%json`."""
_LARK_BLANKS = re.compile(r"(?:\s|(?://|#)[^\n]*)*")


class GrammarSource(NamedTuple):
    """What llguidance compiles."""

    text: str
    left_out: list[str]
    """Patterns that schemas have and the text does not."""


def grammar_source(params: StructuredOutputsParams) -> GrammarSource:
    """Return the text that llguidance compiles.

    Raises:
        InputError: it cannot be made, or it would take too long to compile.
    """
    left_out: list[str] = []
    try:
        return GrammarSource(_text(params, left_out), left_out)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise cannot_use(str(error)) from None


def cannot_use(reason: str) -> InputError:
    """Return the error for a rule that cannot be compiled, in one line: llguidance draws carets."""
    line = " ".join(each.strip() for each in reason.splitlines() if each.strip(" ^"))
    return InputError(f"structured outputs cannot use this: {line:.500}")


def _text(params: StructuredOutputsParams, left_out: list[str]) -> str:
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        texts = " | ".join(map(_quoted, params.choice))
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    if params.grammar is not None:
        lark = _with_schemas_prepared(grammar_from("grammar", params.grammar), left_out)
        _check_end(lark_can_end(lark))
        return lark
    schema = json.loads(str(params.json or '{"type": "object"}'))
    return LLMatcher.grammar_from_json_schema(json.dumps(_prepared(schema, left_out)))


def _prepared(schema: Any, left_out: list[str]) -> Any:
    """Return a JSON schema with a limit on blanks, and without what it gives leave to leave out.

    Raises:
        InputError: it cannot be used as it is; the message says why.
    """
    if not isinstance(schema, dict):
        return schema
    _check_numbers(schema)
    _check_texts(schema)
    _check_open_intervals(schema)
    _check_multiples(schema)
    _check_patterns(schema)
    _check_end(schema_can_end(schema))
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        return schema  # llguidance refuses it
    refuse_unknown(options, _OPTIONS, {}, "x-guidance", "option")
    if options.get("lenient") is True:
        schema = _without_unknown_patterns(schema, left_out)
    else:
        _check_num_properties(schema)
    if "whitespace_flexible" not in options:
        options = {"whitespace_pattern": _BLANKS, **options}
    return {**schema, "x-guidance": {"json_allowed_escapes": _ESCAPES, **options}}


def _check_end(can_end: bool) -> None:
    if not can_end:
        raise cannot_use("no text that ends matches it")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark has no raw one


def _with_schemas_prepared(lark: str, left_out: list[str]) -> str:
    """Return a grammar in Lark's notation in which each schema after `%json` is prepared."""
    parts, end = [], 0
    while (found := _LARK_PARTS.search(lark, end)) is not None:
        parts.append(lark[end : found.end()])
        end = found.end()
        if found[0] == "%json":
            blanks = _LARK_BLANKS.match(lark, end)
            start = end if blanks is None else blanks.end()
            decoder = json.JSONDecoder(object_pairs_hook=unique_names)
            schema, end = decoder.raw_decode(lark, start)
            parts.append(f" {json.dumps(_prepared(schema, left_out))}")
    return "".join([*parts, lark[end:]])


def _check_numbers(schema: dict[str, Any]) -> None:
    """Refuse numbers that llguidance would change, or that would end the process."""
    for each in _dicts(schema):
        for name in each.keys() & {*_BOUNDS, "const", "enum"}:
            for number in _leaves(each[name]):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    continue
                binds_nothing = name in _UPPER_BOUNDS and number >= 2**63 - 1
                is_large = name in _BOUNDS and abs(number) > LARGEST_EXACT
                if (is_large or not _is_exact(number)) and not binds_nothing:
                    raise cannot_use(f"{name}: a grammar does not keep the number {number}")


def _check_texts(schema: dict[str, Any]) -> None:
    """Refuse texts that cannot be written without the escape `u`."""
    for each in _dicts(schema):
        for name in each.keys() & {"const", "enum"}:
            for text in _leaves(each[name]):
                if isinstance(text, str) and (found := _NEED_U.search(text)):
                    raise cannot_use(f"{name}: a grammar does not write the character {found[0]!r}")


def _check_open_intervals(schema: dict[str, Any]) -> None:
    """Refuse intervals shorter than 1 that exclude a whole number at the end that is nearer to 0:
    llguidance allows it."""
    dicts = list(_dicts(schema))
    is_joined = any(
        each.keys() & {"allOf", "patternProperties"}
        or (each.keys() & _COMBINES and each.keys() & _BOUNDS)
        for each in dicts
    )
    for group in [dicts] if is_joined else [[each] for each in dicts]:
        below = _bounds(group, "maximum") | _bounds(group, "exclusiveMaximum")
        above = _bounds(group, "minimum") | _bounds(group, "exclusiveMinimum")
        first = _bounds(group, "exclusiveMinimum") & {math.floor(end) for end in below if end % 1}
        last = _bounds(group, "exclusiveMaximum") & {math.ceil(end) for end in above if end % 1}
        for end in (*(each for each in first if each >= 0), *(each for each in last if each <= 0)):
            raise cannot_use(f"a grammar does not exclude {end} from an interval that is so short")


def _bounds(schemas: list[dict[str, Any]], name: str) -> set[float]:
    return {each[name] for each in schemas if name in each and isinstance(each[name], int | float)}


def _is_exact(number: float) -> bool:
    """Return whether llguidance reads this number as it is, and writes it so."""
    if not math.isfinite(number):
        return False
    _, digits, exponent = Decimal(str(number)).as_tuple()
    text = "".join(map(str, digits))
    exponent = int(exponent) + len(text) - len(text := text.rstrip("0"))
    return int(text or 0) <= LARGEST_EXACT and -22 <= exponent <= 22


def _check_multiples(schema: dict[str, Any]) -> None:
    """Refuse a schema whose numbers have too many remainders: each needs a state of the grammar."""
    multiples: list[Decimal] = []
    keys: list[str] = []
    for each in _dicts(schema):
        keys += each
        value = each.get("multipleOf")
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            multiples.append(Decimal(str(value)))
    if not multiples:
        return
    # 0.25 has 25 remainders, and 100 has 1: decimal digits after the last that counts are free.
    digits = max(0, *(-int(each.as_tuple().exponent) for each in multiples))
    wholes = [int(each.scaleb(digits)) for each in multiples]
    if _COMBINES & set(keys):
        wholes = [math.lcm(*wholes)]
    largest = max(int(str(whole).rstrip("0")) for whole in wholes)
    num_remainders = largest * (len(multiples) + keys.count("$ref"))
    if num_remainders > MAX_REMAINDERS:
        text = f"multipleOf makes {num_remainders:,} remainders; at most {MAX_REMAINDERS:,} "
        raise cannot_use(text + "are taken")


def _check_patterns(schema: dict[str, Any]) -> None:
    """Refuse an object whose patterns match no other names than those of `properties`: llguidance
    allows a comma after the last of these, and then nothing."""
    from llguidance import LLMatcher, LLTokenizer

    for each in _dicts(schema):
        patterns, named = each.get("patternProperties"), each.get("properties")
        if each.get("additionalProperties") is not False or not (patterns and named):
            continue
        if not (isinstance(patterns, dict) and isinstance(named, dict)):
            continue  # llguidance refuses it
        if False in patterns.values():  # it is left out
            continue
        others = {
            "type": "object",
            "properties": dict.fromkeys(named, False),
            "patternProperties": dict.fromkeys(patterns, True),
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
        matcher = LLMatcher(
            LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(others)), log_level=0
        )
        if not matcher.is_error() and matcher.try_consume_tokens([*b'{"']) < 2:
            text = "patternProperties match no names but those of properties: "
            raise cannot_use(text + ", ".join(map(repr, patterns)))


def _check_num_properties(schema: dict[str, Any]) -> None:
    """Refuse an object that needs two names or more that no schema names: llguidance counts a name
    that comes twice as two."""
    for each in _dicts(schema):
        least, required = each.get("minProperties"), each.get("required")
        most = 1 + len(required) if isinstance(required, list) else 1
        if isinstance(least, int) and least > most:
            text = f"minProperties {least}: a grammar does not tell names apart that are not in "
            raise cannot_use(text + f"required, so here at most {most} can be asked for")


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts within a JSON value: a `$ref` may make a schema of any of them."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all values within a JSON value that are no dicts and no lists."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        else:
            yield value


def _without_unknown_patterns(schema: Any, left_out: list[str]) -> Any:
    """Return a schema without the patterns that llguidance cannot compile."""
    if isinstance(schema, list):
        return [_without_unknown_patterns(each, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        patterns = value if key == "patternProperties" else [value] if key == "pattern" else []
        unknown = {each for each in patterns if isinstance(each, str) and not _is_pattern(each)}
        left_out += sorted(unknown)
        if key in _OF_SCHEMAS and isinstance(value, dict):
            kept[key] = {
                name: _without_unknown_patterns(each, left_out)
                for name, each in value.items()
                if name not in unknown
            }
        elif key in _NO_SCHEMAS:
            kept[key] = value
        elif not unknown:
            kept[key] = _without_unknown_patterns(value, left_out)
    return kept


def _is_pattern(pattern: str) -> bool:
    """Return whether llguidance can compile this pattern of a JSON schema."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
