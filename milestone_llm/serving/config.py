"""Options of a server. Those of its engine are the milestone's `EngineConfig`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from milestone_llm.core.errors import InputError

MAX_CONNECTIONS = 1024
"""Unless the server is told another number, or may not have so many files open."""


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, what it lets in, and how it ends. Each field is an option.

    Raises:
        InputError: a value that no server could keep to.
    """

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets others in."""
    port: int = 8000
    """0: one that is free."""
    allowed_hosts: Sequence[str] = ()
    """Names of the server that clients may use, beside localhost; without them, any name is taken
    where there is a key or the address is not this machine's own."""
    allowed_origins: Sequence[str] = ()
    """Of web pages whose scripts may use the server, such as http://localhost:3000; * for all."""
    api_key: Sequence[str] = ()
    """Ask for one of these keys; a prompt cached for one key is not found by another."""
    api_key_file: Path | None = None
    """A key a line; on a command line, every user of the machine can read them.
    MILESTONE_LLM_API_KEY of the environment may hold keys, too, with spaces between."""
    log_level: Literal["error", "warning", "info", "debug"] = "warning"
    """What is said of the server's doing; info: a line for each answer, too."""
    served_model_name: str | None = None
    """By which clients ask for the model; without it, that of its folder or file."""
    max_queued: int = 256
    """Completions that may wait for a row; more are answered 429."""
    max_body_bytes: int = 8 * 2**20
    """Of a request."""
    max_bodies_bytes: int = 128 * 2**20
    """Of all requests together, except the first 64 KiB of each; more are answered 503."""
    max_connections: int | None = None
    """Clients at one time; without it 1,024, or fewer if `ulimit -n` is low."""
    request_seconds: tuple[float, float] = (10.0, 30.0)
    """For how long a client may take over the head of a request, and over its body."""
    drain_seconds: float = 30.0
    """For how long requests under way may go on after SIGTERM or Ctrl-C."""
    page: bool = True
    """Show steps as they happen at /; every client with a key sees all steps there."""
    disable_log_stats: bool = False
    """No line of figures every ten seconds in which something ran."""
    replicas: int | None = None
    """So many engines behind a router, on Ray Serve."""
    ray_address: str | None = None
    """Of a running Ray cluster; without it, replicas are on this machine."""
    autoscaling: Sequence[str] = ()
    """Of Ray Serve's AutoscalingConfig, such as max_replicas=4 target_ongoing_requests=16."""
    debug: bool = False
    """No process for the engine, so that breakpoint() works in it; Ctrl-C is Python's own."""

    def __post_init__(self) -> None:
        """Check what stands for itself."""
        counts = ("max_queued", "max_body_bytes", "max_bodies_bytes", "max_connections", "replicas")
        for name in counts:
            if (number := getattr(self, name)) is not None and number < 1:
                raise InputError(f"{name} must be at least 1, got {number}")
        for seconds in (*self.request_seconds, self.drain_seconds):
            if not 0 <= seconds < math.inf:
                raise InputError(f"seconds are a number from 0 on, got {seconds}")
        for key in self.api_key:  # what a client can send in a header
            if not (key.isascii() and key.isprintable()) or " " in key or not key:
                raise InputError("a key is printable ASCII without spaces, and not empty")
        for origin in self.allowed_origins:  # what a browser sends
            parts = urlsplit(origin)
            if origin != "*" and (origin != f"{parts.scheme}://{parts.netloc}" or not parts.netloc):
                raise InputError(f"an origin is SCHEME://HOST[:PORT] or *, got {origin}")

    @property
    def has_page(self) -> bool:
        """Whether the explorer page is at `/`: it shows one engine."""
        return self.page and not self.replicas
