"""Clients on paper, for `router_simulation`: conversations that share system prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK_SIZE = 16
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = (256, 1024), (16, 256), (32, 512)
SYSTEMS_EACH = 10
"""System prompts for each replica."""
PROMPTS_A_SECOND = 6.0
"""For each replica."""
MEAN_TURNS, MEAN_THINKING_S = 3, 10.0
TOKEN_S = 0.01
"""Seconds for each token of an answer, at least."""


@dataclass(slots=True)
class Prompt:
    """A question of a session, with all that was said before."""

    now: float
    """Seconds since the start."""
    session: int
    system: int
    """Which system prompt it begins with."""
    num_system: int
    """Tokens of that."""
    num_prompt: int
    """Tokens of all of it."""
    num_answer: int
    """Tokens of the answer that is to come."""
    names: list[bytes]
    """Of every `stride`-th block of the prompt: what a router of this stride remembers."""


class Clients:
    """What is asked, and when; the same for all policies. Everything is drawn at the start.

    Args:
        stride: name every `stride`-th block only; no block if None.
    """

    def __init__(self, num_replicas: int, num_prompts: int, stride: int | None, seed: int) -> None:
        draw = np.random.default_rng(seed)

        def between(limits: tuple[int, int], size: int) -> np.ndarray:
            return draw.integers(*limits, size, endpoint=True)

        def before(values: np.ndarray) -> np.ndarray:
            """For each turn, the sum over the turns of its session before it."""
            sums = values.cumsum() - values
            return sums - sums[first[session]]

        num_sessions = num_prompts  # more than begin in that time
        sessions_a_second = num_replicas * PROMPTS_A_SECOND / MEAN_TURNS
        begin = draw.exponential(1 / sessions_a_second, num_sessions).cumsum()
        num_systems = SYSTEMS_EACH * num_replicas
        zipf = (1 / np.arange(1, num_systems + 1)).cumsum()
        system = zipf.searchsorted(draw.random(num_sessions) * zipf[-1])
        system_tokens = between(SYSTEM_TOKENS, num_systems)
        # What follows has a place for each turn, one session's turns after another's.
        num_turns = draw.geometric(1 / MEAN_TURNS, num_sessions)
        first = num_turns.cumsum() - num_turns
        session = np.arange(num_sessions).repeat(num_turns)
        total = len(session)
        question, answer = between(QUESTION_TOKENS, total), between(ANSWER_TOKENS, total)
        pause = answer * TOKEN_S + draw.exponential(MEAN_THINKING_S, total)
        time = begin[session] + before(pause)
        system = system[session]
        num_system = system_tokens[system]
        num_prompt = num_system + before(question + answer) + question
        order = time.argsort(kind="stable")[:num_prompts]
        columns = (time, session, system, num_system, num_prompt, answer)
        self._columns = [column[order] for column in columns]
        self._name_tokens = stride * BLOCK_SIZE if stride else sys.maxsize
        self._system_names = [
            _names(-number - 1, 0, num_tokens // self._name_tokens)
            for number, num_tokens in enumerate(system_tokens.tolist())
        ]

    def prompts(self) -> Iterator[Prompt]:
        """In the order of time."""
        num_parts = len(self._columns[0]) // 10_000 + 1  # not all numbers as objects at one time
        parts = zip(*(np.array_split(column, num_parts) for column in self._columns), strict=True)
        for part in parts:
            for now, session, system, num_system, num_prompt, num_answer in zip(
                *(column.tolist() for column in part), strict=True
            ):
                shared = self._system_names[system]
                names = shared + _names(session, len(shared), num_prompt // self._name_tokens)
                yield Prompt(now, session, system, num_system, num_prompt, num_answer, names)


def _names(owner: int, first: int, end: int) -> list[bytes]:
    """Stand-ins for SHA-256: as long, and as distinct."""
    return [((owner << 20) + i).to_bytes(32, "big", signed=True) for i in range(first, end)]
