"""An HTTP server with answers that a test chooses."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    """A POST; `body` is its parsed JSON, if it is JSON."""

    path: str
    headers: Mapping[str, str]
    body: Any
    times: int
    """Number of requests with this body so far, from 1."""


Reply = Callable[[Request], tuple[int, Any] | None]
"""Status and content (bytes, or a value sent as JSON). Status 0 hangs up, None never answers."""


class JsonServer(ThreadingHTTPServer):
    """Answers with what `reply` returns, and records the requests."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.is_over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(data) if data.startswith(b"{") else data
        with self.server.lock:
            times = 1 + sum(request.body == body for request in self.server.requests)
            self.server.requests.append(Request(self.path, self.headers, body, times))
            request = self.server.requests[-1]
        reply = self.server.reply(request)
        if reply is None:
            self.server.is_over.wait()
            return
        status, content = reply
        if status == 0:
            self.close_connection = True
            return
        answer = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def json_server(reply: Reply) -> Iterator[JsonServer]:
    with JsonServer(reply) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
