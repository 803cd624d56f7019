"""Turn conversations into prompts with a tokenizer's chat template. Nothing here imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from milestone_llm.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[dict[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of a conversation. They end where the assistant's answer begins.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        messages: such as `[{"role": "user", "content": "Hello"}]`.
        template_kwargs: variables of the chat template, such as `enable_thinking`.
        tools: functions that the model may call. Many templates ignore them.

    Raises:
        InputError: there is no tokenizer, no chat template, or no message; the template does not
            accept the messages; or a variable has the name of an option of `apply_chat_template`.
    """
    if tokenizer is None:
        raise InputError("a chat needs a tokenizer, and this model was loaded without one")
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
            "give the prompt as plain text or as token ids"
        )
    if not messages:
        raise InputError("a chat needs at least one message, got 0")
    variables = template_kwargs or {}
    options = inspect.signature(tokenizer.apply_chat_template).parameters if variables else {}
    if taken := [name for name in variables if name in options]:
        raise InputError(
            f"chat_template_kwargs is for variables that a chat template has of its own, and "
            f"{taken[0]} is an option of apply_chat_template"
        )
    try:
        # return_dict=False: since transformers 5 the default is a BatchEncoding.
        return list(
            tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **variables,
            )
        )
    except Exception as error:  # a template's code may raise anything
        raise InputError(f"the chat template does not take these messages: {error}") from error
