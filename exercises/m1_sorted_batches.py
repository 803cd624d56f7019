"""Static batches of requests that resemble each other, so that less of them is padding.

`Scheduler` (m1_single/scheduler.py) forms a batch of whoever came first. Padding is what the
longest prompt and the longest output exceed the others by, so a batch of similar requests has less.
Let `_form_batch` look at all waiting requests and choose. Two conditions:

1. Whoever waits longest is in the next batch. Otherwise one odd request might wait for ever.
2. Who is not chosen keeps its place: those left in `self.waiting` are in the order of arrival.

`request.num_prompt_tokens` and `request.sampling_params.max_tokens` are known before a request
runs; `request.arrival` says who came first.

    python -m pytest tests/exercises/test_m1_sorted_batches.py
"""

from __future__ import annotations

from m1_single.scheduler import Scheduler
from milestone_llm.engine.request import Request


class SortedScheduler(Scheduler):
    """A static scheduler with batches of similar requests."""

    def _form_batch(self) -> list[Request]:
        """Choose who of `self.waiting` forms the next batch.

        Hint: take out of `self.waiting` whom you do not want, let `super()._form_batch()` take from
        the rest, and put the others back.
        """
        raise NotImplementedError
