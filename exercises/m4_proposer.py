"""M4: guess what others were told.

With `speculation="ngram"` a request guesses its next tokens from its own: see
m4_prefix_chunked/ngram.py. At a help desk that is a pity. Many answers hold the same sentences, and
the first time that a request comes to one of them, its own tokens do not know it. Other requests'
tokens do.

Write a proposer that knows the tokens of all requests that it was asked about. Conditions:

1. Where a request's own tokens have a guess, that guess is given: it was right so far.
2. Else the guess is what followed the same three tokens, or else two, in any request, the last
   time. Over the desk's answers a step brings at least half a token more than with own tokens
   alone.
3. Tenants stay apart. Requests with another `sampling_params.cache_salt` are strangers: a guess
   that comes true makes an answer come sooner, and so tells what somebody else was told.
4. Nothing is guessed while a token of the request is in flight (`request.num_in_flight`).

A bad guess costs time and never changes a token, so no test here looks at tokens that come out.

To serve with it: `engine.scheduler.speculation.proposer = SharedProposer()`, in an engine that was
built with `speculation="ngram"`.

    python -m pytest tests/exercises/test_m4_proposer.py
"""

from __future__ import annotations

from m4_prefix_chunked.ngram import NgramProposer
from milestone_llm.core.request import Request


class SharedProposer(NgramProposer):
    """Guesses from the tokens of a request, and from those of others."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that may come behind the known ones.

        Hint: `super().propose` gives the guess of condition 1. Keep one dictionary for each salt,
        from an n-gram to where its follower stands: in which list of tokens, and at which place.
        At each call note those n-grams of the request that are new since the last one.
        """
        raise NotImplementedError
