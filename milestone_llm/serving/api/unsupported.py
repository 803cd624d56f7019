"""Fields that clients send and this server does not support.

Fields that OpenAI, vLLM, SGLang or llama.cpp have are rejected by name, unless their value asks for
nothing: an answer that silently lacks its tools would be worse than an error. Other fields are
ignored and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from typing import Any

from .errors import MAX_CHARACTERS, ApiError

log = logging.getLogger(__name__)

MAX_NAMED = 1024
"""Most unknown fields that are named in the log."""

_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # in chats: the template has them
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),  # without a chat template
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "echo": (False,),  # in chats
    "function_call": ("none",),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_predict": (),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repeat_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_regex": (),
    "structural_tag": (),
    "structured_outputs": ({},),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),  # without a chat
    "tools": ([],),
    "top_n_sigma": (-1,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Known fields that are not supported, and the values (besides null) that have no effect. A body
with a field of this name does support it."""

_NOTHING_TO_DO = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "verbosity",
}
"""Fields of OpenAI's that are wishes: an answer without them is right, too."""


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
    """Log which fields of a body are ignored; each is logged once."""
    wishes = {name for name in body if name in _NOTHING_TO_DO and body[name] is not None}
    _wishes.note(wishes)
    _unknown_fields.note(
        name
        for name in body
        if name not in known and name not in _ASKS_FOR_NOTHING and name not in _NOTHING_TO_DO
    )


class UnknownFields:
    """Names of ignored fields that the log has named. It names `MAX_NAMED` at most, so that clients
    can fill neither the log nor the memory.

    Args:
        text: what the log says of them.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._named: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log those of the names that have not been logged."""
        new = sorted({ascii(name)[:MAX_CHARACTERS] for name in names} - self._named)
        new = new[: MAX_NAMED - len(self._named)]
        self._named.update(new)
        if new:
            log.warning("%s: %s", self._text, f"[{', '.join(new)}]"[:MAX_CHARACTERS])
            if len(self._named) == MAX_NAMED:
                log.warning("%d such fields have been named; others will not be", MAX_NAMED)


_unknown_fields = UnknownFields("These fields of a request are not known here, and were ignored")
_wishes = UnknownFields(
    "These fields of a request change nothing here, unless the chat template has variables for them"
)


def unsupported(name: str) -> ApiError:
    """Return the error for a field that this server does not support."""
    return ApiError(400, f"{name} is not supported by this server", param=name)
