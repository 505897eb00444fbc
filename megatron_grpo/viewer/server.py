"""Server of the page, on this host alone.

Python's http.server is enough: it listens on the loopback interface for a single user, answers GET
only, and never writes a file.
"""

import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from megatron_grpo.viewer.html_file import CONTENT_TYPES, PAGE, plotly_file
from megatron_grpo.viewer.run import RunFiles

HOST = "127.0.0.1"
OUR_NAMES = {HOST, "localhost"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:"
)
"""Content Security Policy of the page; `unsafe-inline` is for the style elements of plotly.js."""


class Server(ThreadingHTTPServer):
    """Serves the page of `runs`, by name. Raises ValueError if the port is taken."""

    daemon_threads = True

    def __init__(self, runs: dict[str, RunFiles], port: int) -> None:
        self.runs = runs
        self.files = {file.name: file for file in [*PAGE.iterdir(), plotly_file()]}
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise ValueError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): choose another --port"
            ) from None

    def answer(self, url: str) -> tuple[str, bytes] | None:
        """(content type, body) for a URL; None if it is unknown."""
        parts = urlsplit(url)
        name = parts.path.removeprefix("/") or "index.html"
        if name == "api/runs":
            runs = [{"name": name, **run.summary()} for name, run in self.runs.items()]
            return CONTENT_TYPES[".json"], json.dumps(runs).encode()
        if name.startswith("api/"):
            body = self._ask(name.removeprefix("api/"), parts.query)
            return (CONTENT_TYPES[".json"], body) if body is not None else None
        if name in self.files:
            return CONTENT_TYPES[Path(name).suffix], self.files[name].read_bytes()
        return None

    def _ask(self, question: str, query: str) -> bytes | None:
        try:
            arguments = dict(parse_qsl(query, keep_blank_values=True))
            run = list(self.runs.values())[int(arguments.pop("run"))]
        except (ValueError, KeyError, IndexError):
            return None
        return run.answer(question, arguments)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no error for a page that was closed before it had its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET; http.server refuses every other method."""

    server: Server

    def do_GET(self) -> None:
        if not is_ours(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "This page is served on this host alone")
            return
        answer = self.server.answer(self.path)
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content_type, body = answer
        self.send_response(HTTPStatus.OK)
        for name, value in {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line in the terminal."""


def is_ours(host: str) -> bool:
    """Whether a Host header names this host, with any port: `ssh -L` has its own."""
    # DNS rebinding: a foreign site may resolve its name to 127.0.0.1, and its scripts could then
    # read this page. The browser still sends the foreign name.
    return host.rpartition(":")[0] in OUR_NAMES if ":" in host else host in OUR_NAMES
