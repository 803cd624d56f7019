"""A client for measuring: bare HTTP over asyncio's streams, which takes next to no CPU time."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/completions"


async def open_request(
    url: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a completion, on a connection that ends with the answer.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.

    Raises:
        OSError: no server listens there.
    """
    content, address = json.dumps(body).encode(), urlsplit(url)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(
        address.hostname, address.port or 80, limit=2**22
    )
    writer.write(head.encode() + content)
    return reader, writer
