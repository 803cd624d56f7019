"""What JSON made, checked against the types of a dataclass: the one place that trusts no file.

A trace may come from anybody. Whoever draws one takes for granted that a number is a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

_WORDS = {
    "phase": ("prefill", "decode", "padding"),
    "unit": ("token", "region", "block"),
    "type": ("alloc", "free", "share", "copy_on_write", "evict", "swap_out", "swap_in"),
}
"""Fields that have one of a few words."""
_OPTIONAL = {"held"}
_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
_NAMES |= {list: "a list", dict: "an object", NoneType: "null"}

Check = Callable[[Any, str], Any]
"""A value and the name of its field, for messages (`batch[2].start`, "" for the whole)."""


def checker(kind: Any) -> Check:
    """What gives back a value as a `kind`: objects become dataclasses, without further fields.

    It raises a ValueError that names the field where a value is something else, or missing.

    Args:
        kind: a dataclass, a `TypedDict`, `list[...]`, `dict[str, ...]`, `X | None`, text, or a
            number, which must be finite and not negative.
    """
    if is_dataclass(kind) or is_typeddict(kind):
        checks = {field: checker(inner) for field, inner in get_type_hints(kind).items()}
        return lambda value, name: kind(**_fields(_of_type(value, dict, name), checks, name))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is None:
        return lambda value, name: _of_type(value, kind, name)
    check = checker(arguments[-1] if origin is dict else arguments[0])
    if origin is dict:
        return lambda value, name: {
            key: check(own, f"{name}[{json.dumps(key)}]")
            for key, own in _of_type(value, dict, name).items()
        }
    if origin is list:
        return lambda value, name: _items(_of_type(value, list, name), arguments[0], check, name)
    return lambda value, name: None if value is None else check(value, name)


def _fields(given: dict[str, Any], checks: dict[str, Check], name: str) -> dict[str, Any]:
    made = {}
    for field, check in checks.items():
        where = f"{name}.{field}" if name else field
        if field not in given:
            if field in _OPTIONAL:
                continue
            raise ValueError(f"not a record of an engine's step: {where} is missing")
        made[field] = check(given[field], where)
        if field in _WORDS and made[field] not in _WORDS[field]:
            told = f"{', '.join(_WORDS[field])}; it is {json.dumps(made[field])[:60]}"
            raise ValueError(f"{where} must be one of {told}")
    return made


def _items(values: list[Any], kind: Any, check: Check, name: str) -> list[Any]:
    is_plain = kind in (int, str) and {*map(type, values)} <= {kind}
    if is_plain and (kind is str or min(values, default=0) >= 0):
        return values  # thousands of blocks, quickly
    return [check(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _of_type(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind and not (kind is float and type(value) is int):
        what = f"{name} must be" if name else "not a record of an engine's step: it must be"
        raise ValueError(f"{what} {_NAMES[kind]}, is {_NAMES[type(value)]}")
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ValueError(f"{name} must be 0 or more, and finite; it is {value}")
    return value
