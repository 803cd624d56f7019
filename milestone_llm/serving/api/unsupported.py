"""Fields that clients send and this server does not support.

Fields that OpenAI or vLLM have are rejected by name, unless their value asks for nothing: an answer
that silently lacks its tools would be worse than an error. Other fields are ignored and logged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Container
from typing import Any

from .errors import MAX_CHARACTERS, ApiError

log = logging.getLogger(__name__)

_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # in chats: the template has them
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),  # without a chat template
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),  # in chats
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # without a chat
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known fields that are not supported, and the values (besides null) that have no effect. A body
with a field of this name does support it."""


def refuse_unsupported(body: dict[str, Any], supported: Container[str]) -> None:
    """Reject a body with a field that asks for something unsupported.

    Args:
        supported: fields that this kind of body has.

    Raises:
        ApiError: there is such a field; the message has its name.
    """
    for name, nothing in _ASKS_FOR_NOTHING.items():
        value = body.get(name)
        if value is not None and value not in nothing and name not in supported:
            raise unsupported(name)


def warn_of_unknown(body: dict[str, Any], known: Container[str]) -> None:
    """Log which fields of a body are ignored; the same fields are logged once."""
    names = [name for name in body if name not in known and name not in _ASKS_FOR_NOTHING]
    if names:
        _warn_once(ascii(sorted(names))[:MAX_CHARACTERS])


@functools.lru_cache
def _warn_once(names: str) -> None:
    log.warning("These fields of a request are not known here, and were ignored: %s", names)


def unsupported(name: str) -> ApiError:
    """Return the error for a field that this server does not support."""
    return ApiError(400, f"{name} is not supported by this server", param=name)
