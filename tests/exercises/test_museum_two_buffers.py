"""Exercise: changes that wait for a slow device in one of two buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exercises.museum.exhibit import Arrival, greedy
from exercises.museum.rooms import exhibit
from exercises.museum.slow_device import SlowState

EXERCISE = ("museum_two_buffers.py", "TwoBuffers")
OWN = exhibit("next_steps_rows")
LONG = list(range(50, 70))
TRAFFIC = [
    *OWN.traffic,
    *(Arrival(12 + n, f"long{n}", [n, *LONG], greedy(4)) for n in range(3)),
    Arrival(14, "short", [7, 77], greedy(4)),
]


def check_tokens(cls: type[SlowState]) -> None:
    """Serve on a slow device with this state."""
    make(cls)[0].in_host_memory(changes(0))
    own = replace(OWN, broken=cls, traffic=TRAFFIC)
    run, right = own.run(is_changed=True), own.run(is_changed=False)
    assert right.tokens.keys() == {each.name for each in TRAFFIC}
    wrong = [name for name in right.tokens if run.tokens.get(name) != right.tokens[name]]
    if wrong or run.raised:
        pytest.fail(
            f"wrong tokens: {', '.join(wrong)} {run.raised}. A step was computed with changes of "
            "another one: the buffer was written before its copy was made",
            pytrace=False,
        )


def make(cls: type[SlowState]) -> tuple[SlowState, list[torch.Tensor]]:
    """A state, and the buffers that it makes from now on, the constructor's too."""
    buffers: list[torch.Tensor] = []

    class Counting(cls):
        def pinned(self, size: int) -> torch.Tensor:
            buffers.append(super().pinned(size))
            return buffers[-1]

    return Counting(4, 32, 4, 199, torch.device("cpu")), buffers


def changes(number: int, size: int = 10) -> torch.Tensor:
    return torch.arange(2 * size).view(2, size) + 1000 * number


def check_buffers(cls: type[SlowState], figure=None) -> None:
    """Twenty steps, of which one waits at a time."""
    state, buffers = make(cls)
    before = state.in_host_memory(changes(0))
    for number in range(1, 20):
        own = state.in_host_memory(changes(number))
        places = {each.untyped_storage().data_ptr() for each in buffers}
        if own.untyped_storage().data_ptr() not in places:
            pytest.fail(
                f"the changes of step {number} are in no buffer that `self.pinned` has made: from "
                "other memory no copy can start",
                pytrace=False,
            )
        if not torch.equal(before, changes(number - 1)):
            pytest.fail(
                f"the changes of step {number - 1} were overwritten by those of step {number}, "
                "while they could still be waited for",
                pytrace=False,
            )
        before = own
    if figure:
        figure("buffers made in 20 steps", str(len(buffers)), "20 (M5), 1 (the exhibit)")
    if len(buffers) > 2:
        pytest.fail(
            f"20 steps took {len(buffers)} buffers. Two are enough, if each is used in turn",
            pytrace=False,
        )


def check_large(cls: type[SlowState]) -> None:
    """A step with more changes than a buffer holds, between small ones."""
    state, buffers = make(cls)
    before = state.in_host_memory(changes(0))
    large = state.in_host_memory(changes(1, 700))
    if not (torch.equal(before, changes(0)) and torch.equal(large, changes(1, 700))):
        pytest.fail("700 changes came, and not all that waited is there", pytrace=False)
    after = state.in_host_memory(changes(2))
    if not (torch.equal(large, changes(1, 700)) and torch.equal(after, changes(2))):
        pytest.fail("the step after 700 changes has overwritten them", pytrace=False)
    for number in range(3, 9):
        state.in_host_memory(changes(number, 700 if number % 2 else 10))
    if len(buffers) > 4:
        pytest.fail(f"{len(buffers)} buffers were made: a larger one is kept", pytrace=False)


@pytest.mark.parametrize("check", [check_tokens, check_large])
def test_two_buffers(exercise, check):
    check(exercise)


def test_buffers_are_made_once(exercise, figure):
    check_buffers(exercise, figure)


# --- answers that look right ---------------------------------------------------------------------


class Fresh(SlowState):
    """M5's way."""


class Anywhere(SlowState):
    """Memory that nobody writes a second time, and that no copy can start from."""

    def in_host_memory(self, pairs):
        return pairs


class ByWork(SlowState):
    """The second buffer only if something waits: what waits may be in the second."""

    def in_host_memory(self, pairs):
        buffers = vars(self).setdefault("buffers", [self.pinned(512), self.pinned(512)])
        return buffers[len(self.queue) > 0][:, : pairs.shape[1]].copy_(pairs)


class TooSmall(SlowState):
    """A larger buffer each time."""

    def in_host_memory(self, pairs):
        buffers = vars(self).setdefault("buffers", [self.pinned(512), self.pinned(512)])
        buffers.reverse()
        own = self.pinned(700) if pairs.shape[1] > 512 else buffers[0]
        return own[:, : pairs.shape[1]].copy_(pairs)


def test_one_buffer_is_caught():
    with pytest.raises(pytest.fail.Exception, match="wrong tokens: b"):
        check_tokens(OWN.broken)
    with pytest.raises(pytest.fail.Exception, match="were overwritten"):
        check_buffers(ByWork)


def test_fresh_memory_is_caught():
    check_tokens(Anywhere)
    with pytest.raises(pytest.fail.Exception, match="step 1 are in no buffer"):
        check_buffers(Anywhere)
    check_tokens(Fresh)
    with pytest.raises(pytest.fail.Exception, match="20 steps took 20 buffers"):
        check_buffers(Fresh)
    with pytest.raises(pytest.fail.Exception, match="a larger one is kept"):
        check_large(TooSmall)
