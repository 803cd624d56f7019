"""Traffic as servers see it, made up: everything that is random about it comes from one seed.

Some requests stand alone, some share one of a few system prompts, some open a conversation, whose
next turn is all that was said so far and a little more. Lengths are lognormal: most are short, a
few are very long. Some are aborted on the way. Time is counted in engine steps, so that a seed
gives the same traffic on a fast machine and on a slow one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.core.sampling_params import SamplingParams

ArrivalKind = Literal["poisson", "burst"]

SHARE_OF_PREFIX_USERS, SHARE_OF_CONVERSATIONS = 0.4, 0.25
SHARE_OF_ABORTS, SHARE_OF_FORKS, SHARE_OF_GREEDY = 0.05, 0.03, 0.5
PRIORITIES = (0, 0, 0, 0, -1, 1, 2)
TENANTS = ("", "", "", "tenant-a", "tenant-b")
"""Values of `cache_salt`."""


@dataclass
class PlannedRequest:
    """One request of the traffic."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    abort_after: int | None = None
    """Steps after it was added; None lets it end by itself."""
    num_turns_left: int = 0
    """Further turns of the conversation that this request belongs to."""


@dataclass
class Traffic:
    """`num_requests` requests: `due` gives those that come before a step, `finished` may add more.

    Args:
        arrivals: "poisson" (`rate` a step on average) or "burst" (as many, but all at once).
        burst_size: requests of a burst.
    """

    num_requests: int
    vocab_size: int
    max_model_len: int
    arrivals: ArrivalKind = "poisson"
    rate: float = 4.0
    burst_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.num_left = self.num_requests  # that nobody has asked for yet
        self.later: list[tuple[int, PlannedRequest]] = []  # next turns, with the step of each
        self.next_arrival = 0.0
        shares = (0.2, 0.4, 0.7, 1.0)
        lengths = [max(1, round(self.max_model_len // 3 * share)) for share in shares]
        self.system_prompts = [self._tokens(length) for length in lengths]

    @property
    def is_over(self) -> bool:
        """Whether nobody will come any more, unless a request that still runs has a next turn."""
        return not self.num_left and not self.later

    def due(self, step: int) -> list[PlannedRequest]:
        """Who comes before this step."""
        planned = [turn for when, turn in self.later if when <= step]
        self.later = [entry for entry in self.later if entry[0] > step]
        while self.next_arrival <= step and self.num_left:
            size = self.burst_size if self.arrivals == "burst" else 1
            planned += [self._opening() for _ in range(min(size, self.num_left))]
            self.next_arrival += self.rng.expovariate(self.rate / size)
        return planned

    def finished(self, planned: PlannedRequest, output: RequestOutput, step: int) -> None:
        """Somebody has an answer and may go on with the conversation some steps later."""
        said = [*output.prompt_token_ids, *output.token_ids]
        prompt = said + self._tokens(self._length(8, 0.6, 40))
        is_too_long = len(prompt) > self.max_model_len * 3 // 4
        if planned.num_turns_left and self.num_left and not is_too_long:
            salt = planned.params.cache_salt
            turn = self._planned(prompt, planned.num_turns_left - 1, salt)
            self.later.append((step + self.rng.randint(1, 20), turn))

    def _opening(self) -> PlannedRequest:
        """A request that does not go on with anything."""
        kind = self.rng.random()
        if kind < SHARE_OF_PREFIX_USERS:
            prompt = self.rng.choice(self.system_prompts) + self._tokens(self._length(12, 0.7, 64))
            return self._planned(prompt)
        if kind < SHARE_OF_PREFIX_USERS + SHARE_OF_CONVERSATIONS:
            prompt = self._tokens(self._length(20, 0.6, 64))
            return self._planned(prompt, num_turns_left=self.rng.randint(1, 4))
        return self._planned(self._tokens(self._length(40, 0.9, self.max_model_len * 3 // 4)))

    def _planned(
        self, prompt: list[int], num_turns_left: int = 0, salt: str | None = None
    ) -> PlannedRequest:
        self.num_left -= 1
        rng, room = self.rng, self.max_model_len - len(prompt)
        is_aborted = rng.random() < SHARE_OF_ABORTS
        params = SamplingParams(
            cache_salt=rng.choice(TENANTS) if salt is None else salt,
            temperature=0.0 if rng.random() < SHARE_OF_GREEDY else 0.8,
            seed=rng.getrandbits(32),
            max_tokens=self._length(28, 0.8, min(128, room)),
            n=2 if rng.random() < SHARE_OF_FORKS else 1,
        )
        priority = rng.choice(PRIORITIES)
        abort_after = rng.randint(0, 30) if is_aborted else None
        return PlannedRequest(prompt, params, priority, abort_after, num_turns_left)

    def _length(self, median: float, sigma: float, longest: int) -> int:
        """A lognormal length in tokens, at least 1."""
        return max(1, min(longest, round(self.rng.lognormvariate(math.log(median), sigma))))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]
