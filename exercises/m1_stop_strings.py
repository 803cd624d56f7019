"""M1: show text while it grows, but never a part of a stop string.

A request with `stop=["###"]` ends when its text holds "###", and the user gets the text before it.
With streaming, text is shown as it grows, and what is shown cannot be taken back. So when the text
so far is "Hello #", the last character has to wait: it may be the beginning of "###", or not.

    text so far      shown          why
    "Hello"          "Hello"        no beginning of "###" at the end
    "Hello #"        "Hello "       "#" waits
    "Hello ##"       "Hello "       "##" waits
    "Hello #1"       "Hello #1"     it was no stop string: the "#" comes with the "1"
    "Hello ###"      "Hello "       stop

Write the function that says how much may be shown. Three conditions:

1. No character of a stop string is ever shown.
2. Nothing waits that cannot become part of a stop string.
3. With several stop strings, the one that is complete first ends the text. If two are complete
   with the same character, the one that begins first counts.

The engine's version is in milestone_llm/frontend/detokenizer.py. Look there afterwards.

    python -m pytest tests/exercises/test_m1_stop_strings.py
"""

from __future__ import annotations


def num_shown(text: str, stop: list[str]) -> int:
    """Return how many characters of the text may be shown now.

    Args:
        text: all characters that have been generated.
        stop: strings that end the text, none of them empty.

    Hint: two cases. If a stop string is in the text, find the one that ends first. If none is, look
    for the first place from which the rest of the text is the beginning of a stop string.
    """
    raise NotImplementedError
