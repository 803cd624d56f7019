"""From a user's prompt to checked token ids. Bad input is refused here, with number and limit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams, is_whole_number
from milestone_llm.models.chat import render_chat

Prompt: TypeAlias = str | list[int] | list[dict[str, Any]] | dict[str, Any]
"""Text, token ids, chat messages (`{"role": ..., "content": ...}`), or vLLM's forms of the first
two: `{"prompt": "..."}` and `{"prompt_token_ids": [...]}`."""
Prompts: TypeAlias = Prompt | Sequence[Prompt]


def as_list(prompts: Prompts) -> Sequence[Prompt]:
    """Return the prompts of `generate` as a list, also if a single prompt was given."""
    given: Any = prompts
    try:
        is_one = isinstance(given, str | dict) or not hasattr(given, "__getitem__")
        is_one = is_one or (
            len(given) > 0
            and not isinstance(given[0], str | list | tuple)
            and not _is_named_prompt(given[0])
        )
    except TypeError:  # a tensor of one number
        is_one = True
    return [given] if is_one else given  # `encode_prompt` refuses what is not a prompt


def _is_named_prompt(given: Any) -> bool:
    """Return whether a dictionary is a prompt of its own, and not a message of a chat."""
    return isinstance(given, dict) and not given.keys().isdisjoint(("prompt", "prompt_token_ids"))


def _unnamed(prompt: dict[str, Any]) -> Any:
    """Return the text or the token ids of vLLM's TextPrompt or TokensPrompt.

    Raises:
        InputError: it has anything else, such as an image.
    """
    given = {name: value for name, value in prompt.items() if value is not None}
    if others := given.keys() - {"prompt", "prompt_token_ids"}:
        raise InputError(
            f"a prompt of text or token ids has no {min(map(str, others))!r}: models take text "
            "alone, and a cache_salt is one of SamplingParams"
        )
    if "prompt_token_ids" in given:  # these count, as in vLLM, where both are given
        return given["prompt_token_ids"]
    return given.get("prompt")


def encode_prompt(
    tokenizer: Any,
    prompt: Any,
    chat: bool,
    add_special_tokens: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of a prompt of any kind.

    Args:
        chat: whether a text is a user's message of a chat.
        add_special_tokens: whether any other text gets special tokens (BOS, for instance). A chat
            has those of its template.
        template_kwargs, tools: arguments of `render_chat`.

    Raises:
        InputError: `prompt` is not a prompt, or is text for an engine without a tokenizer.
    """
    if _is_named_prompt(prompt):
        prompt = _unnamed(prompt)
    is_text = isinstance(prompt, str)
    try:
        if isinstance(prompt, bytes | bytearray):
            raise TypeError("bytes are neither text nor token ids")
        is_messages = not is_text and len(prompt) > 0 and isinstance(prompt[0], dict)
        if is_messages and not all(isinstance(message, dict) for message in prompt):
            raise TypeError("a message is a dictionary")
        if not is_text and not is_messages:
            if any(isinstance(token, bool) for token in prompt):
                raise TypeError("True and False are no token ids")
            return [operator.index(token) for token in prompt]
    except (TypeError, KeyError) as error:
        raise InputError(
            f"a prompt is text, a list of token ids or a list of messages, got {prompt!r:.200}"
        ) from error
    if tokenizer is None:
        raise InputError("the engine has no tokenizer: give the prompt as token ids")
    texts = [prompt] if is_text else [text for each in prompt for text in each.values()]
    for text in texts:
        _check_text("the prompt", str(text))
    if is_text and not chat:
        return list(tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    return render_chat(tokenizer, messages, template_kwargs, tools)


def _check_text(what: str, text: str) -> None:
    """Refuse text that cannot be encoded.

    Raises:
        InputError: the text has one half of a surrogate pair alone; the message says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is no valid text: character {error.start} is half of a pair"
        ) from None


def check_prompt(token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    """Refuse token ids that no model step could take.

    Raises:
        InputError: no token, no room for one output token, or a token outside the vocabulary.
    """
    check_length(token_ids, max_model_len)
    check_vocabulary("the prompt", token_ids, vocab_size)


def check_length(token_ids: list[int], max_model_len: int) -> None:
    """Refuse a prompt of too few tokens or too many.

    Raises:
        InputError: the prompt has no token, or leaves no room for one output token.
    """
    if not token_ids:
        raise InputError("the prompt is empty: it has 0 tokens and needs at least 1")
    if len(token_ids) >= max_model_len:
        raise InputError(
            f"the prompt has {len(token_ids)} tokens, but max_model_len={max_model_len} leaves "
            f"room for at most {max_model_len - 1} and one token of output"
        )


def check_params(
    params: SamplingParams, vocab_size: int, tokenizer: Any, eos_token_ids: frozenset[int]
) -> None:
    """Refuse sampling parameters that do not fit the model.

    Raises:
        InputError: no `SamplingParams`, a token id outside the vocabulary, more logprobs than
            tokens, `stop` or `bad_words` without a tokenizer, or `min_tokens` when every token
            stops.
    """
    if not isinstance(params, SamplingParams):
        raise InputError(f"sampling parameters must be SamplingParams, got {params!r}")
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    check_vocabulary("logit_bias", params.logit_bias, vocab_size)
    check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise InputError(
                f"{name}={getattr(params, name)} exceeds the vocabulary of {vocab_size} tokens"
            )
    stop_token_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
    if params.min_tokens and len(stop_token_ids) >= vocab_size:
        raise InputError(
            f"min_tokens={params.min_tokens} forbids stop tokens, and all {vocab_size} tokens of "
            "the vocabulary are stop tokens: there is nothing to sample"
        )
    for name in ("stop", "bad_words"):
        if getattr(params, name) and tokenizer is None:
            text = f"{name}={getattr(params, name)!r:.200} needs a tokenizer"
            raise InputError(f"{text}, and the engine has none")


def with_whole_vocabulary(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return sampling parameters in which the number of logprobs -1, for all, is a count."""
    if params.logprobs == -1:
        params = replace(params, logprobs=vocab_size)
    if params.prompt_logprobs == -1:
        params = replace(params, prompt_logprobs=vocab_size)
    return params


def check_priority(priority: Any) -> None:
    """Refuse a priority that a queue could not put in order.

    Raises:
        InputError: the priority is not a whole number, or a float does not hold it exactly.
    """
    if not is_whole_number(priority) or abs(priority) > 2**53:
        wanted = "a whole number in [-(2**53), 2**53]"
        raise InputError(f"priority must be {wanted}, got {priority!r:.200}")


def check_is_id(request_id: Any) -> None:
    """Refuse a value that cannot be the id of any request.

    Raises:
        InputError: the value is not a string.
    """
    if not isinstance(request_id, str):
        raise InputError(f"request_id must be a string, got {request_id!r:.200}")


def check_request_id(request_id: Any, is_taken: Callable[[str], bool]) -> None:
    """Refuse an id that would not name exactly one request.

    Raises:
        InputError: the id is not a string, or belongs to another request.
    """
    check_is_id(request_id)
    if not request_id:
        raise InputError("request_id must be a string that is not empty, got ''")
    _check_text("request_id", request_id)
    if is_taken(request_id):
        raise InputError(
            f"request_id {request_id!r} belongs to an unfinished request, or to one whose last "
            "output has not been taken yet"
        )


def check_vocabulary(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InputError: names the first of them.
    """
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{what} holds token id {token}, but the vocabulary ends at {vocab_size - 1}"
            )
