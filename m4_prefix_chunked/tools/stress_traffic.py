"""Made-up requests as servers see them. Everything random in them comes from one seed.

Half of them begin with one of a few system prompts, and some go on with a conversation. Lengths are
lognormal: most are short, a few very long. Time is counted in engine steps, so that a seed gives
the same traffic on any machine.
"""

from __future__ import annotations

import argparse
import math
import random

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lab.bench.workloads import WorkItem


class Traffic:
    """`args.requests` requests: `due` gives those that come, `ended` may keep some for later."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self.num_left, self.longest, self.vocab_size = args.requests, args.max_model_len, vocab_size
        self.burst_size = args.concurrency if args.arrivals == "burst" else 1
        self.rate = (args.rate or args.concurrency / 20) / self.burst_size
        self.rng, self.next_arrival = random.Random(args.seed), 0.0
        self.later: list[WorkItem] = []  # conversations that go on
        self.system_prompts = [self._tokens(self.longest // share) for share in (3, 4, 8, 15)]

    def due(self, step: int) -> list[WorkItem]:
        """Return the requests that come before this step; half of the new ones begin with one of a
        few system prompts."""
        items = [item for item in self.later if item.arrival_step <= step]
        self.later = [item for item in self.later if item.arrival_step > step]
        while self.next_arrival <= step and self.num_left:
            for _ in range(min(self.burst_size, self.num_left)):
                beginning = self.rng.choice([*self.system_prompts, *[[]] * 4])
                items.append(self._item(beginning + self._tokens(self._length(self.longest // 3))))
            self.next_arrival += self.rng.expovariate(self.rate)
        return items

    def ended(self, item: WorkItem, output: RequestOutput, step: int) -> None:
        """Take note of a request that has ended. A quarter of those with an answer go on with the
        conversation some steps later."""
        prompt = [*output.prompt_token_ids, *output.token_ids, *self._tokens(self._length(40))]
        goes_on = self.rng.random() < 0.25 and output.finish_reason in ("stop", "length")
        if goes_on and self.num_left and len(prompt) < self.longest * 3 // 4:
            later = step + self.rng.randint(1, 20)
            self.later.append(self._item(prompt, item.params.cache_salt, later))

    def _item(self, prompt: list[int], salt: str | None = None, step: int = 0) -> WorkItem:
        self.num_left -= 1
        rng, room = self.rng, self.longest - len(prompt)
        params = SamplingParams(
            cache_salt=rng.choice(("", "", "a", "b")) if salt is None else salt,  # tenants
            temperature=rng.choice((0.0, 0.8)),
            seed=rng.getrandbits(32),
            max_tokens=self._length(min(128, room)),
            n=2 if rng.random() < 0.03 else 1,
        )
        return WorkItem(prompt, params, step, priority=rng.choice((0, 0, -1, 1)))

    def _length(self, longest: int) -> int:
        return min(longest, math.ceil(self.rng.lognormvariate(math.log(25), 0.9)))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]
