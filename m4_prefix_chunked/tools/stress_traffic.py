"""Traffic as servers see it, made up: everything that is random about it comes from one seed.

Some requests stand alone, some share one of a few system prompts, some open a conversation, whose
next turn is all that was said so far and a little more. Lengths are lognormal: most are short, a
few are very long. Some are aborted on the way. Time is counted in engine steps, so that a seed
gives the same traffic on a fast machine and on a slow one.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from milestone_llm.engine.outputs import RequestOutput
from milestone_llm.engine.sampling_params import SamplingParams

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
    num_left: int = field(init=False)
    """Requests that nobody has asked for yet."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.num_left = self.num_requests
        longest = self.max_model_len // 3
        self.system_prompts = [
            self._tokens(max(1, round(longest * share))) for share in (0.2, 0.4, 0.7, 1.0)
        ]
        self.later: deque[tuple[int, PlannedRequest]] = deque()
        """Next turns of conversations, and the step before which each comes."""
        self._next_arrival = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nobody will come any more, unless a request that still runs has a next turn."""
        return not self.num_left and not self.later

    def due(self, step: int) -> list[PlannedRequest]:
        """Who comes before this step."""
        planned = []
        while self.later and self.later[0][0] <= step:
            planned.append(self.later.popleft()[1])
        while self._next_arrival <= step and self.num_left:
            size = self.burst_size if self.arrivals == "burst" else 1
            planned += [self._opening() for _ in range(min(size, self.num_left))]
            self._next_arrival += self.rng.expovariate(self.rate / size)
        return planned

    def finished(self, planned: PlannedRequest, output: RequestOutput, step: int) -> None:
        """Somebody has an answer and may go on with the conversation some steps later."""
        said = [*output.prompt_token_ids, *output.token_ids]
        own = self._tokens(self._length(8, 0.6, 40))
        is_too_long = len(said) + len(own) > self.max_model_len * 3 // 4
        if not planned.num_turns_left or not self.num_left or is_too_long:
            return
        turn = self._planned([*said, *own], planned.num_turns_left - 1)
        turn.params = self._params(len(turn.prompt), planned.params.cache_salt)
        pause = step + self.rng.randint(1, 20)
        self.later.append((pause, turn))
        self.later = deque(sorted(self.later, key=lambda entry: entry[0]))

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

    def _planned(self, prompt: list[int], num_turns_left: int = 0) -> PlannedRequest:
        self.num_left -= 1
        is_aborted = self.rng.random() < SHARE_OF_ABORTS
        return PlannedRequest(
            prompt=prompt,
            params=self._params(len(prompt), self.rng.choice(TENANTS)),
            priority=self.rng.choice(PRIORITIES),
            abort_after=self.rng.randint(0, 30) if is_aborted else None,
            num_turns_left=num_turns_left,
        )

    def _params(self, num_prompt_tokens: int, cache_salt: str) -> SamplingParams:
        is_greedy = self.rng.random() < SHARE_OF_GREEDY
        room = self.max_model_len - num_prompt_tokens
        return SamplingParams(
            temperature=0.0 if is_greedy else 0.8,
            seed=self.rng.getrandbits(32),
            max_tokens=self._length(28, 0.8, min(128, room)),
            n=2 if self.rng.random() < SHARE_OF_FORKS else 1,
            cache_salt=cache_salt,
        )

    def _length(self, median: float, sigma: float, longest: int) -> int:
        """A lognormal length in tokens, at least 1."""
        return max(1, min(longest, round(self.rng.lognormvariate(math.log(median), sigma))))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]
