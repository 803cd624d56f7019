"""Lazy imports: names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from milestone_llm import how_to_install

CLASSES_INSTEAD = {
    "AsyncLLMEngine": "an engine steps in one thread: `stream`, or `python -m {package}.serve`",
    "AsyncLLM": "an engine steps in one thread: `stream`, or `python -m {package}.serve`",
    "EngineArgs": "EngineConfig has the fields, and LLMEngine(model, **fields) takes them",
    "AsyncEngineArgs": "EngineConfig has the fields, and LLMEngine(model, **fields) takes them",
    "GuidedDecodingParams": "StructuredOutputsParams",
    "BeamSearchParams": "there is no beam search: n completions with temperature above 0",
    "PoolingParams": "models generate text; there are no embeddings",
    "CompletionOutput": "RequestOutput.outputs has them",
    "EmbeddingRequestOutput": "models generate text; there are no embeddings",
    "ModelRegistry": "causal language models of transformers are served as they are",
    "TextPrompt": 'a dictionary: {{"prompt": "..."}}',
    "TokensPrompt": 'a dictionary: {{"prompt_token_ids": [...]}}',
}
"""Names of vLLM's root that a milestone's root lacks, with what to use."""


def lazy(package: str, **module_of: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package`: each name comes from its module when it is first used.

    An engine imports torch and transformers, which takes seconds that `--help` does not need. Where
    a library is missing, the ModuleNotFoundError says how to install it. `LLM`, vLLM's name, is
    another name of `LLMEngine`; an ImportError says what takes the place of vLLM's other names.
    """

    def get(name: str) -> Any:
        name = "LLMEngine" if name == "LLM" else name
        if name not in module_of and name in CLASSES_INSTEAD:
            instead = CLASSES_INSTEAD[name].format(package=package)
            raise ImportError(f"{package} has no {name} of vLLM's; instead: {instead}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(module_of[name], package)
        except ModuleNotFoundError as error:
            error.msg = how_to_install(error)
            raise
        return getattr(module, name)

    return get
