"""Lazy imports: names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from milestone_llm import how_to_install


def lazy(package: str, **module_of: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package`: each name comes from its module when it is first used.

    An engine imports torch and transformers, which takes seconds that `--help` does not need. Where
    a library is missing, the ModuleNotFoundError says how to install it.
    """

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(module_of[name], package)
        except ModuleNotFoundError as error:
            error.msg = how_to_install(error)
            raise
        return getattr(module, name)

    return get
