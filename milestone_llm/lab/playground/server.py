"""The playground's server, for this machine only."""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .service import Playground

MAX_BODY = 2**20


class PlaygroundServer(ThreadingHTTPServer):
    """An HTTP server at 127.0.0.1, which no other machine can reach.

    Other pages in the reader's browser can. They are recognised by what the browser sends: a `Host`
    (a name of theirs that resolves to 127.0.0.1), or another `Origin`. And no page may send JSON to
    another site without asking it first.
    """

    daemon_threads = True

    def __init__(self, playground: Playground, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answers, self.html = playground.answers, playground.html()
        port = self.server_address[1]
        self.hosts = {f"{host}:{port}" for host in ("127.0.0.1", "localhost")}
        self.origins = {None, *(f"http://{host}" for host in self.hosts)}
        self.url = f"http://127.0.0.1:{port}/"
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', self.html)
        self.page_headers = {
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, except when a page was closed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Sends the page, and answers its questions."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    # otherwise a body waits 40 ms until its headers are acknowledged
    disable_nagle_algorithm = True
    server: PlaygroundServer

    def do_GET(self) -> None:
        """Send the page."""
        if self._is_ours() and self.path.partition("?")[0] == "/":
            self._send(200, self.server.html, "text/html")
        else:
            self._send(404, f"there is only {self.server.url}")

    def do_POST(self) -> None:
        """Answer a question of the page. The body is JSON; for bad input the answer is 400 and one
        line."""
        length = self.headers.get("Content-Length", "")
        answer = self.server.answers.get(self.path)
        if answer is None or not self._is_ours() or not length.isdecimal():
            return self._refuse(403, "this is for the page alone")
        if int(length) > MAX_BODY:
            return self._refuse(413, f"at most {MAX_BODY:,} bytes are read")
        try:
            text = answer(json.loads(self.rfile.read(int(length))))
        except (ValueError, RecursionError) as error:  # bad input, no JSON, too long a number
            return self._send(400, str(error))
        self._send(200, text)

    def _is_ours(self) -> bool:
        is_json = self.headers.get_content_type() == "application/json" or self.command == "GET"
        origin, host = self.headers.get("Origin"), self.headers.get("Host")
        return host in self.server.hosts and origin in self.server.origins and is_json

    def _refuse(self, status: int, text: str) -> None:
        self.close_connection = True  # the rest of the request is not read
        self._send(status, text)

    def _send(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**headers, **self.server.page_headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there would be a line for every change on the page."""
