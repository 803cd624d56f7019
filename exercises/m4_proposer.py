"""M4: propose draft tokens from other requests' answers.

With `speculation="ngram"` a request takes its draft tokens from its own tokens: see
m4_prefix_chunked/ngram.py. At a help desk that is not enough. Many answers have the same sentences.
When a request comes to one of them for the first time, its own tokens do not have it. Other
requests' tokens do.

Write a proposer that knows the tokens of all requests that it was asked about. Conditions:

1. If a request's own tokens have a proposal, it is taken: so far it was right.
2. Otherwise the proposal is what followed the same three tokens, or else two, in any request, the
   last time. Over the desk's answers a step brings at least half a token more than with own tokens
   alone.
3. Tenants stay apart. Requests with another `sampling_params.cache_salt` are not used: an accepted
   draft token makes an answer come sooner, and so tells what another tenant was told.
4. Nothing is proposed while a token of the request is in flight (`request.num_in_flight`).

A bad proposal costs time and never changes a token, so no test here looks at tokens that come out.

To serve with it: `engine.scheduler.speculation.proposer = SharedProposer()`, in an engine that was
built with `speculation="ngram"`.

    python -m pytest tests/exercises/test_m4_proposer.py
"""

from __future__ import annotations

from m4_prefix_chunked.ngram import NgramProposer
from milestone_llm.core.request import Request


class SharedProposer(NgramProposer):
    """Proposes tokens from those of a request, and from those of others."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens that may follow the known ones.

        Hint: `super().propose` gives the proposal of condition 1. Keep one dictionary for each
        salt, from an n-gram to the place of the token after it: in which list of tokens, and at
        which index. At each call add those n-grams of the request that are new since the last one.
        """
        raise NotImplementedError
