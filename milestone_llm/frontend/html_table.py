"""Tables that a notebook shows in place of a `repr`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


def html_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a line above it; values are escaped."""
    title = " ".join(_cell("b" if at == 0 else "span", value) for at, value in enumerate(head))
    body = "".join(f"<tr>{''.join(_cell('td', value) for value in row)}</tr>" for row in rows)
    return f"<div>{title}</div><table>{body}</table>"


def flat(values: Mapping[str, object]) -> dict[str, object]:
    """Return nested dictionaries as one, with names like `kv.used`."""
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": own for inner, own in flat(value).items()}
        else:
            found[name] = value
    return found


def _cell(tag: str, value: object) -> str:
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f"<{tag} style='text-align: left; white-space: pre-wrap'>{html.escape(text)}</{tag}>"
