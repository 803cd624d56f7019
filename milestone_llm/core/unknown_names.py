"""Keywords that are no fields: the refusal names what to use instead, or the nearest field."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from .errors import InputError

CUTOFF = 0.75
"""How similar a name must be to be suggested, as `difflib.SequenceMatcher.ratio` measures it."""


def refuse_unknown(
    given: Iterable[str],
    known: Sequence[str],
    instead: Mapping[str, str],
    of: str,
    noun: str = "field",
) -> None:
    """Refuse keywords that are not known.

    Args:
        instead: what to use in place of a name of vLLM's.
        of: what has the known keywords, and noun: what they are there, for the message.

    Raises:
        InputError: names a keyword, and what to use instead or the nearest known one.
    """
    for name in given:
        if name in known:
            continue
        if name in instead:
            raise InputError(f"{of} has no {noun} {name!r} of vLLM's; instead: {instead[name]}")
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=CUTOFF)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}"
        raise InputError(f"{of} has no {noun} {name!r}; {hint}")


SAMPLING_INSTEAD = {
    "detokenize": "nothing: text is made when it is asked for",
    "logits_processors": "there are logit_bias, allowed_token_ids, bad_words and "
    "structured_outputs",
    "extra_args": "no further arguments are taken",
    "guided_decoding": "structured_outputs=StructuredOutputsParams(...)",
    "spaces_between_special_tokens": "the tokenizer decides",
    "truncate_prompt_tokens": "give the prompt as token ids, cut as you like",
    "output_kind": "`stream` yields outputs as they grow, `generate` the last ones",
    "best_of": "n completions, all returned",
    "use_beam_search": "there is no beam search: n completions with temperature above 0",
    "length_penalty": "there is no beam search",
    "early_stopping": "there is no beam search",
}
"""Arguments of vLLM's `SamplingParams`."""
