"""The trainer's HTTP connections to an engine that follows a script."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing

import pytest

from helpers.engines.proxies import DEAD, set_proxies
from helpers.runs.stopped import stop_for
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.engine import Engine
from megatron_grpo.engines.http import EngineDown, EngineError, http_client, is_healthy, status_of
from megatron_grpo.workers import http as session_module
from parallel.clock import run

NUM_REQUESTS = 100
CHUNK = {
    "weight_versions": [{"version": "7", "start": 0, "end": 1}],
    "finish_reason": None,
    "text": "a",
    "token_ids": [5],
    "logprobs": {"content": [{"logprob": -0.5}]},
}
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer_of(body: bytes, status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} x\r\nLocation: /\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """The address of a server that handles connections with `serve`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=NUM_REQUESTS)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answering(*parts: bytes, then: str = "close") -> Serve:
    """Read a request and send these parts; then close, reset or keep the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: " in head.lower():
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)
        if then == "reset":
            writer.transport.abort()
        elif then == "close":
            writer.close()
        else:
            await reader.read()  # until the client gives up
            writer.close()

    return serve


def engine_of(url: str, http, health: float = 5.0) -> Engine:
    return Engine(url, http, health_timeout=health, stall_timeout=5.0)


async def ask(url: str, request_timeout: float = 5.0, connect_timeout: float = 5.0) -> int:
    async with http_client(url, "token", request_timeout, connect_timeout) as http:
        return await engine_of(url, http).num_open_requests()


def test_all_requests_are_open_at_once_and_idle_connections_are_given_up(monkeypatch):
    monkeypatch.setattr(session_module, "KEEP_ALIVE_SECONDS", 0.2)

    async def ask_all() -> tuple[int, int]:
        num_open = most = num_asked = 0
        all_asked = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_open, most, num_asked
            num_open += 1
            most = max(most, num_open)
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    num_asked += 1
                    if num_asked == NUM_REQUESTS:
                        all_asked.set()
                    await all_asked.wait()
                    writer.write(answer_of(b"{}"))
            except asyncio.IncompleteReadError:
                num_open -= 1
                writer.close()

        async with serving(serve) as url, http_client(url, "token", 30.0, 30.0) as http:
            engine = engine_of(url, http)
            await asyncio.gather(*(engine._request("GET", "/load") for _ in range(NUM_REQUESTS)))
            kept = num_open
            await engine._request("GET", "/load")
            assert num_open == kept  # reuses an open connection
            async with asyncio.timeout(30):
                while num_open:
                    await asyncio.sleep(0.01)
            await engine._request("GET", "/load")
        return most, kept

    assert run(ask_all()) == (NUM_REQUESTS, NUM_REQUESTS)


HALF = answer_of(b"{}")[:-1]
GONE = "cannot be reached at /load: "
LATE = r"did not answer /load within 0.3 s \(rollout.request_timeout\)$"
TOKEN = "refuses the token in MEGATRON_GRPO_TOKEN: set it to the one that the engine was started"
CASES = {
    "closed without an answer": (answering(), EngineDown, f"{GONE}Server dis"),
    "reset without an answer": (answering(b"HTTP/1.1 ", then="reset"), EngineDown, GONE),
    "closed in mid-answer": (answering(HALF), EngineDown, GONE),
    "reset in mid-answer": (answering(HALF, then="reset"), EngineDown, GONE),
    "no HTTP": (answering(b"SSH-2.0-OpenSSH\r\n\r\n"), EngineDown, GONE),
    "late": (answering(then="keep"), TimeoutError, LATE),
    "late in mid-answer": (answering(HALF, then="keep"), TimeoutError, LATE),
    "another token": (answering(answer_of(b"", 401)), EngineDown, TOKEN),
    "fault of the request": (
        answering(answer_of(b"why\xff", 404)),
        EngineError,
        "answered /load with 404: why\ufffd$",
    ),
    "fault of the engine": (
        answering(answer_of(b"why", 503)),
        EngineDown,
        "answered /load with 503: why$",
    ),
}


@pytest.mark.parametrize(("serve", "kind", "error"), CASES.values(), ids=CASES)
def test_a_request_that_fails_says_why(serve, kind, error):
    async def refused() -> None:
        async with serving(serve) as url:
            with pytest.raises(kind, match=f"^rollout engine {url} {error}") as raised:
                await ask(url, request_timeout=0.3)
            assert raised.type is kind

    run(refused())


def test_an_engine_that_is_not_there_is_down():
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineDown, match=f"^rollout engine {url} cannot be reached at /load: Conn"):
        run(ask(url))
    assert not is_healthy(url)


def test_an_engine_that_takes_no_connection_is_down_after_the_time_out():
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as full:
        address = full.getsockname()[:2]
        url = f"http://127.0.0.1:{address[1]}"
        with socket.create_connection(address), closing(socket.socket()) as second:
            second.setblocking(False)
            second.connect_ex(address)
            with pytest.raises(EngineDown, match=f"^rollout engine {url} cannot be reached$"):
                run(ask(url, request_timeout=60.0, connect_timeout=0.3))


def test_an_engine_that_stops_reading_a_request_is_late():
    async def ask_much() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(1.0)
            writer.close()

        async with serving(serve) as url, http_client(url, "token", 0.3, 0.3) as http:
            await engine_of(url, http).post("/load", {"much": "a" * (64 << 20)})

    with pytest.raises(TimeoutError, match=LATE):
        run(ask_much())


def test_a_stream_that_stops_in_the_middle_keeps_its_tokens():
    event = b"data: " + json.dumps({"choices": [CHUNK]}).encode() + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n"
    request, begun = {"sampling_params": {"max_tokens": 9}}, Choice.empty()

    async def complete() -> None:
        serve = answering(head, event, event[:9])
        async with serving(serve) as url, http_client(url, "token", 5.0, 5.0) as http:
            await engine_of(url, http).complete(request, lambda: range(7, 8), begun=begun)

    with pytest.raises(EngineDown, match="cannot be reached at /inference/v1/generate: "):
        run(complete())
    assert begun.token_ids == [5]


def test_a_completion_may_take_any_time():
    choice = CHUNK | {"finish_reason": "stop"}
    answer = answer_of(json.dumps({"choices": [choice]}).encode())
    parts = [answer[i : i + 50] for i in range(0, len(answer), 50)]

    async def complete() -> Choice:
        async with serving(answering(*parts)) as url, http_client(url, "token", 0.01, 5.0) as http:
            request = {"sampling_params": {"max_tokens": 9}}
            return await engine_of(url, http).complete(request, lambda: range(7, 8))

    assert run(complete()).token_ids == [5]


def test_requests_go_below_the_address_with_the_token_and_through_no_proxy(monkeypatch):
    set_proxies(monkeypatch, http_proxy=DEAD, all_proxy=DEAD)
    heads = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer_of(b"", 307))
        writer.close()

    async def asked() -> tuple[int, str]:
        async with serving(serve) as url:
            return await asyncio.to_thread(
                *(status_of, "POST", f"{url}/below/", "/sleep?level=1", 5.0, "secret")
            )

    assert run(asked()) == (307, "307 x")
    [head] = heads
    assert head.startswith(b"POST /below/sleep?level=1 HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in head


@pytest.mark.parametrize(("status", "is_ready"), [(200, True), (307, False), (503, False)])
def test_an_engine_is_healthy_if_it_says_so(status, is_ready):
    async def asked() -> bool:
        async with serving(answering(answer_of(b"", status))) as url:
            return await asyncio.to_thread(is_healthy, url)

    assert run(asked()) is is_ready


STOPPED = """
import asyncio, sys
from megatron_grpo.engines.http import http_client, is_healthy
from megatron_grpo.engines.engine import Engine
from parallel.clock import run

async def ask(url):
    healthy = asyncio.create_task(asyncio.to_thread(is_healthy, url, 3.5))
    async with http_client(url, "token", 3.5, 3.5) as http:
        load = await Engine(url, http, 3.5, 3.5).num_open_requests()
    print(await healthy, load)

run(ask(sys.argv[1]))
"""


def test_time_in_which_the_trainer_was_stopped_does_not_count():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", STOPPED, url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            asked = [server.accept()[0] for _ in range(2)]
            for each in asked:
                each.recv(1 << 16)
            stop_for(5.0, trainer.pid)
            for each in asked:
                each.settimeout(0.7)
                with pytest.raises(TimeoutError):  # it still waits
                    each.recv(1)
                each.sendall(answer_of(b'{"server_load": 0}'))
                each.close()
            output, _ = trainer.communicate(timeout=30)
    assert (trainer.returncode, output) == (0, "True 0\n")
