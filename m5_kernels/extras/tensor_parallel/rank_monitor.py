"""Notice when the process of another rank ends, and then end this one."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

FOLLOWS, LEAVES = b"f", b"l"
"""What a rank says of itself: it follows rank 0, or it leaves, after so many exchanges."""
HANDSHAKE_SECONDS = 5.0
"""How long rank 0 waits for a connection to say which rank it is."""


class RankMonitor:
    """A connection between each rank and rank 0, which is closed when one of the two processes
    ends.

    A kernel that waits for a GPU whose process has died waits for ever, and Python waits with it.
    The operating system closes its connections, so the other process learns of its end.

    Args:
        group: process group of all ranks, over the CPU.
        num_exchanges: returns how many of rank 0's calls this rank has received.
    """

    def __init__(
        self, rank: int, size: int, group: dist.ProcessGroup, num_exchanges: Callable[[], int]
    ) -> None:
        self._rank, self._size, self._num_exchanges = rank, size, num_exchanges
        self.has_followers = False
        self.gone: set[int] = set()
        """Ranks that have left."""
        self._is_closed = False
        self._connections: list[socket.socket] = []
        host = os.environ.get("MASTER_ADDR", "localhost")
        invitation = torch.tensor([0, secrets.randbits(62)])  # port, and a secret of the ranks
        if rank == 0:
            with socket.create_server((host, 0), backlog=size) as listener:
                invitation[0] = listener.getsockname()[1]
                dist.broadcast(invitation, 0, group=group)
                self._accept(listener, _secret(invitation))
        else:
            dist.broadcast(invitation, 0, group=group)
            connection = socket.create_connection((host, int(invitation[0])))
            connection.sendall(_secret(invitation) + rank.to_bytes(2, "little"))
            self._start(connection, 0)

    def _accept(self, listener: socket.socket, secret: bytes) -> None:
        """Wait for every other rank. Close connections that do not know the secret."""
        missing = set(range(1, self._size))
        while missing:
            connection, _ = listener.accept()
            connection.settimeout(HANDSHAKE_SECONDS)
            word = b""
            with contextlib.suppress(OSError):
                word = connection.recv(10, socket.MSG_WAITALL)
            rank = int.from_bytes(word[8:], "little")
            if word[:8] == secret and rank in missing:
                missing.remove(rank)
                connection.settimeout(None)
                self._start(connection, rank)
            else:
                connection.close()

    def _start(self, connection: socket.socket, other: int) -> None:
        self._connections.append(connection)
        threading.Thread(target=self._listen, args=(connection, other), daemon=True).start()

    def _listen(self, connection: socket.socket, other: int) -> None:
        last = b""
        with contextlib.suppress(OSError):
            while word := connection.recv(1):
                self.has_followers |= word == FOLLOWS
                last = word + (connection.recv(8, socket.MSG_WAITALL) if word == LEAVES else b"")
        if self._is_closed:
            return
        is_done = int.from_bytes(last[1:], "little") >= self._num_exchanges()
        if last[:1] == LEAVES and is_done:
            self.gone.add(other)
            return
        print(
            f"rank {other} of {self._size} has ended in the middle of the work, "
            f"so rank {self._rank} ends, too",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def say(self, word: bytes) -> None:
        """Send a message to the other end of each connection."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(word)

    def close(self) -> None:
        """Close the connections. Ranks that were not told why end as well."""
        self._is_closed = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _secret(invitation: torch.Tensor) -> bytes:
    return int(invitation[1]).to_bytes(8, "little")
