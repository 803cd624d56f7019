"""Options of a server. The options of its engine are the milestone's `EngineConfig`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from milestone_llm.core.errors import InputError

MAX_CONNECTIONS = 1024
"""Most connections, unless an option says otherwise or fewer files may be open."""


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, what it accepts, and how it ends. Each field is an option.

    Raises:
        InputError: a value that is out of range or malformed.
    """

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets others in."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    allowed_hosts: Sequence[str] = ()
    """Names of the server that clients may use, in addition to localhost; without them, every name
    is accepted if there is a key or if the address is not this machine's own."""
    allowed_origins: Sequence[str] = ()
    """Origins of web pages whose scripts may use the server, such as http://localhost:3000; * for
    all."""
    api_key: Sequence[str] = ()
    """Accept only requests with one of these keys; a prompt cached for one key is not found with
    another."""
    api_key_file: Path | None = None
    """File with one key a line; other users of the machine can read keys of a command line, but not
    those in a file. The environment variable MILESTONE_LLM_API_KEY may also have keys, separated by
    spaces."""
    log_level: Literal["error", "warning", "info", "debug"] = "warning"
    """How much the server logs; info: also a line for each answer."""
    served_model_name: str | None = None
    """Name of the model for clients; without it, the name of its folder or file."""
    max_queued: int = 256
    """Completions that may wait for a row; further ones are answered with 429; of several keys, one
    that has more than its share leaves a share free for the others."""
    max_body_bytes: int = 8 * 2**20
    """Largest body of a request, in bytes."""
    max_bodies_bytes: int = 128 * 2**20
    """Largest sum of all bodies, without the first 64 KiB of each, in bytes; further ones are
    answered with 503."""
    max_connections: int | None = None
    """Clients at one time; without it 1,024, or fewer if `ulimit -n` is low."""
    request_seconds: tuple[float, float] = (10.0, 30.0)
    """Seconds that a client may take to send the head of a request, and to send its body."""
    drain_seconds: float = 30.0
    """Seconds that running requests may go on after SIGTERM or Ctrl-C."""
    page: bool = True
    """Show steps as they happen at /; every client with a key sees all steps there."""
    reasoning_content: bool = True
    """Give the text between <think> and </think> in a field of its own, if the chat template knows
    these marks."""
    disable_log_stats: bool = False
    """Do not log a line of figures every ten seconds."""
    replicas: int | None = None
    """Number of engines, on Ray Serve with a router before them."""
    ray_address: str | None = None
    """Address of a running Ray cluster; without it, replicas are on this machine."""
    autoscaling: Sequence[str] = ()
    """Fields of Ray Serve's AutoscalingConfig, such as max_replicas=4
    target_ongoing_requests=16."""
    debug: bool = False
    """Run the engine in the server's process, so that breakpoint() works in it; Ctrl-C is Python's
    own."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
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
