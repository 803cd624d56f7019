"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazy(package: str, **module_of: str) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: each name comes from its module when it is first used.

    An engine imports torch and transformers, which takes seconds that `--help` does not need.
    """

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    return get
