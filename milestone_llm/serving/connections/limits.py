"""What a server lets in, as its command line says."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from .admission import is_loopback
from .connection import ConnectionLimits


@dataclass(frozen=True)
class Limits:
    """What the server lets in, and how it ends."""

    connections: ConnectionLimits
    api_keys: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    """Names of the server that a client may use, beside those of this machine's loopback."""
    takes_any_host: bool = False
    """If none is given."""
    allowed_origins: Sequence[str] = ()
    """Of pages in browsers that may use the server; `*` for all."""
    model_name: str | None = None
    """By which clients ask for the model; None: its own."""
    log_level: str = "warning"
    max_queued: int = 256
    """Completions that may wait beyond the rows of a step."""
    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int = 128 * 2**20
    """Of all requests together."""
    drain_seconds: float = 30.0
    """For how long requests under way may go on after SIGTERM."""
    has_page: bool = True
    """Whether the explorer page is at `/`: every client with a key sees all steps there."""

    @classmethod
    def of(cls, args: argparse.Namespace, listener: socket.socket) -> Limits:
        """Those that a command line asks for."""
        return cls(
            ConnectionLimits(args.max_connections, *args.request_seconds),
            api_keys=args.api_key,
            allowed_hosts=args.allowed_hosts,
            takes_any_host=bool(args.api_key) or not is_loopback(listener.getsockname()[0]),
            allowed_origins=args.allowed_origins,
            model_name=args.served_model_name,
            log_level=args.log_level,
            max_queued=args.max_queued,
            max_body_bytes=args.max_body_bytes,
            max_bodies_bytes=args.max_bodies_bytes,
            drain_seconds=args.drain_seconds,
            has_page=args.page and not args.replicas,
        )
