"""A reference engine on top of `transformers`, with the client's routes of vLLM or of our SGLang.

Samples of one prompt that wait at the same time are one batch; prompts are processed one after the
other, without padding. A run gets its URL like that of any external engine, and treats it as vLLM,
or as the engine that `--engine` names.

    PYTHONPATH=.:tests python -m reference_engine.server --model FOLDER --host 127.0.0.1 --port 8000
"""

import argparse
import json
import os
import socket
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron_grpo.engine_weights.protocol import Json
from megatron_grpo.engines.access import REFUSAL, is_allowed
from megatron_grpo.launch.run_dir import check_token, take_token
from reference_engine.engine import Abandoned, TransformersEngine

MAX_REFUSED_BYTES = 1 << 16
"""Most bytes to read of a request without the token; its sender reads the answer only after it has
sent the request."""

GENERATE = "/inference/v1/generate"
ROUTES: dict[str, Callable[..., Json | bytes]] = {
    "/health": TransformersEngine.answer_nothing,
    "/load": TransformersEngine.load,
    "/metrics": TransformersEngine.metrics,
    GENERATE: TransformersEngine.generate,
    "/sleep": TransformersEngine.answer_nothing,  # without effect: it frees no memory
    "/wake_up": TransformersEngine.answer_nothing,
    "/pause": TransformersEngine.pause,
    "/resume": TransformersEngine.resume,
    "/collective_rpc": TransformersEngine.answer_as_worker,
    "/update_weight_version": TransformersEngine.update_weight_version,
    "/reset_prefix_cache": TransformersEngine.reset_prefix_cache,
}


class RequestHandler(BaseHTTPRequestHandler):
    """Handles one connection; `main` sets `engine` and `token`."""

    protocol_version = "HTTP/1.1"  # connections stay open
    engine: TransformersEngine
    token: str

    def do_POST(self) -> None:
        """Answer by the method in `ROUTES`."""
        route = urlsplit(self.path).path
        authorization = self.headers.get("Authorization", "").encode("latin-1")
        length = int(self.headers.get("Content-Length", 0))
        if is_allowed(self.command, route, authorization, self.token):
            try:
                self._send(*self._result(route, self.rfile.read(length)))
            except (Abandoned, ConnectionError):
                self.close_connection = True
        else:
            self.rfile.read(min(length, MAX_REFUSED_BYTES))
            self.close_connection = True
            self._send(401, REFUSAL)

    do_GET = do_POST

    def _result(self, route: str, body: bytes) -> tuple[int, bytes]:
        """Status and content of the response."""
        more = {"is_wanted": self._is_wanted} if route == GENERATE else {}
        try:
            answer = ROUTES[route](self.engine, json.loads(body or b"{}"), **more)
            return 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        except Abandoned:
            raise
        except Exception as error:
            traceback.print_exc()
            return 500, json.dumps({"error": {"message": repr(error)}}).encode()

    def _is_wanted(self) -> bool:
        """Whether the client is still connected (it sends nothing more before the response)."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing per request."""


class Server(ThreadingHTTPServer):
    """A server with a thread per connection."""

    request_queue_size = 4096  # all requests of a generation connect at once

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), RequestHandler)


def main() -> None:
    """Serve until killed; the token is in the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--host", required=True, help="one address of this host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--enable-return-indexer-topk", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.dtype)
    RequestHandler.engine = TransformersEngine(
        arguments.model,
        dtype,
        device,
        arguments.enable_return_routed_experts,
        arguments.enable_return_indexer_topk,
        arguments.engine,
    )
    RequestHandler.token = check_token(take_token(os.environ))
    Server(arguments.host, arguments.port).serve_forever()


if __name__ == "__main__":
    main()
