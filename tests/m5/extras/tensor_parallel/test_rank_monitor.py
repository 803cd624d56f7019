"""The connections between ranks: whoever else comes to rank 0's port is sent away."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from m5_kernels.extras.tensor_parallel import rank_monitor
from m5_kernels.extras.tensor_parallel.rank_monitor import FOLLOWS, LEAVES, RankMonitor

PATIENCE = 60.0
"""Seconds after which what has not happened will not."""


class Invited:
    """Rank 0 that waits for rank 1, and what it has told rank 1 over their group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.invitation: Any = None
        self.monitor: RankMonitor | None = None
        self.callers: list[socket.socket] = []
        self.exits: list[int] = []
        is_out = threading.Event()

        def broadcast(tensor: torch.Tensor, source: int, group: Any) -> None:
            self.invitation = tensor.clone()
            is_out.set()

        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setattr(rank_monitor.dist, "broadcast", broadcast)
        monkeypatch.setattr(rank_monitor, "HANDSHAKE_SECONDS", PATIENCE)
        monkeypatch.setattr(os, "_exit", self.exits.append)
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()
        assert is_out.wait(PATIENCE)

    def _accept(self) -> None:
        self.monitor = RankMonitor(0, 2, None, lambda: 0)  # type: ignore[arg-type]

    def knock(self, word: bytes = b"") -> socket.socket:
        """Somebody connects to the port and says something."""
        caller = socket.create_connection(("localhost", int(self.invitation[0])), PATIENCE)
        caller.sendall(word)
        self.callers.append(caller)
        return caller

    def right_word(self) -> bytes:
        """What rank 1 says."""
        return int(self.invitation[1]).to_bytes(8, "little") + (1).to_bytes(2, "little")


@pytest.fixture
def invited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Invited]:
    """A rank 0 that waits; in the end its connections are closed before it can end anything."""
    invited = Invited(monkeypatch)
    yield invited
    if invited.monitor is not None:
        invited.monitor.close()


def until(is_true: Callable[[], bool]) -> None:
    """Wait, on a busy machine for long."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if is_true():
            return
        time.sleep(0.01)
    pytest.fail("it never happened")


@pytest.mark.parametrize(
    ("word", "closes"),
    [(b"", True), (b"", False), (b"GET / HTTP/1.1\r\n", False), (bytes(8) + b"\1\0", False)],
    ids=["nothing, and closes", "nothing, and waits", "http", "a wrong secret"],
)
def test_a_stranger_does_not_end_rank_0_and_is_no_rank(word, closes, invited, monkeypatch):
    monkeypatch.setattr(rank_monitor, "HANDSHAKE_SECONDS", 0.2)
    stranger = invited.knock(word)
    if closes:
        stranger.close()
    else:
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b"", "it is sent away"
    monkeypatch.setattr(rank_monitor, "HANDSHAKE_SECONDS", PATIENCE)
    rank_1 = invited.knock(invited.right_word())
    invited.thread.join(PATIENCE)
    rank_1.sendall(FOLLOWS + LEAVES + (7).to_bytes(8, "little"))  # words may come together
    rank_1.close()
    until(lambda: invited.monitor.gone == {1} or invited.exits)
    assert invited.exits == []
    assert invited.monitor.has_followers


def test_no_two_callers_are_the_same_rank(invited):
    """One that has the secret, but a number that is not missing."""
    for number in (0, 2, 9):
        invited.knock(invited.right_word()[:8] + number.to_bytes(2, "little"))
    assert invited.monitor is None
    invited.knock(invited.right_word())
    invited.thread.join(PATIENCE)
    assert invited.monitor is not None
    assert invited.exits == []


def test_a_rank_that_goes_without_a_word_ends_this_one(invited, capfd):
    rank_1 = invited.knock(invited.right_word())
    invited.thread.join(PATIENCE)
    rank_1.close()
    until(lambda: invited.exits == [1])
    assert "rank 1 of 2 has ended in the middle of the work" in capfd.readouterr().err
