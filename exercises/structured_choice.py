"""Structured output: which tokens may come next, if the output has to be one of some texts.

A request with `choice=["red", "reddish", "blue"]` may answer with one of three texts and with
nothing else. A model writes tokens, and a token may be one letter or several:

    output so far    may come next
    ""               "r", "re", "red", "b", "bl", ...      each that a choice begins with
    "r"              "e", "ed", ...                        what is left of a choice begins with it
    "red"            the end, "d", "di", "dish", ...       "red" is complete, "reddish" is not
    "blue"           the end                               and nothing else

Write the function that says which. Three conditions:

1. A token may come if some choice begins with the output and the token.
2. The end (EOS) may come if the output is a choice, and only then.
3. A text can be written in more ways than one: "re" + "d" and "r" + "ed" are both "red".

Every letter is a token, so that every allowed token can be continued.

llguidance does the same for a grammar; see milestone_llm/structured/grammars.py afterwards.

    python -m pytest tests/exercises/test_structured_choice.py
"""

from __future__ import annotations


def allowed_tokens(
    choices: list[str], texts: list[str], eos_token_id: int, output_token_ids: list[int]
) -> set[int]:
    """Return the ids of the tokens that may come next.

    Args:
        choices: the output has to become one of them.
        texts: text of each token, by its id; that of EOS does not matter.
        output_token_ids: the output so far. A rejected draft token may break it: then no choice
            begins with it.

    Hint: the text of the output is all that counts, not how it was cut into tokens.
    """
    raise NotImplementedError
