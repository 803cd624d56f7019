"""M1: static batches of requests of similar length, so that less of the work is padding.

`Scheduler` (m1_single/scheduler.py) forms a batch of the requests that came first. A batch is as
wide as its longest prompt, and runs as long as its longest output. For shorter requests the rest is
padding. Requests of similar length waste less.

Write `_form_batch` so that it chooses from all waiting requests. Two conditions:

1. The request that has waited longest is in the next batch. Without this, one request of an
   unusual length could wait for ever.
2. A request that is not chosen keeps its place: `self.waiting` stays in the order of arrival.

The test has requests of two sizes, and wants more than 95 % of the computed positions to be useful.

`request.num_prompt_tokens` and `request.sampling_params.max_tokens` are known before a request
runs. `request.arrival` says who came first.

    python -m pytest tests/exercises/test_m1_sorted_batches.py
"""

from __future__ import annotations

from m1_single.scheduler import Scheduler
from milestone_llm.core.request import Request


class SortedScheduler(Scheduler):
    """A static scheduler with batches of similar requests."""

    def _form_batch(self) -> list[Request]:
        """Choose the requests of `self.waiting` that form the next batch.

        Hint: remove from `self.waiting` the requests that you do not want, let
        `super()._form_batch()` take the rest, and add the removed ones again.
        """
        raise NotImplementedError
