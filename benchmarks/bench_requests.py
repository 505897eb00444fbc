"""The trainer's cost of a thousand concurrent completions, with an engine that takes no time.

    .venv/bin/python benchmarks/bench_requests.py

The engine is a process that answers a round once it has all of its requests. Prints wall-clock and
CPU seconds of the best round, and the milliseconds of one request with a new and with a kept
client.
"""

import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from statistics import median

from aiohttp import web

from megatron_grpo.engines.engine import GENERATE, Engine
from megatron_grpo.engines.http import http_client
from parallel.clock import run

NUM_REQUESTS, NUM_TOKENS, NUM_ROUNDS, NUM_SINGLE = 1000, 200, 7, 100
CHOICE = {
    "weight_versions": [{"version": "0", "start": 0, "end": NUM_TOKENS}],
    "finish_reason": "length",
    "text": "a" * NUM_TOKENS,
    "token_ids": [*range(NUM_TOKENS)],
    "logprobs": {"content": [{"logprob": -0.5}] * NUM_TOKENS},
}
REQUEST = {"token_ids": [*range(NUM_TOKENS)], "sampling_params": {"max_tokens": NUM_TOKENS}}


async def serve(pipe: Connection) -> None:
    """Answer completions a round at a time, and /load at once."""
    answer, waiting = json.dumps({"choices": [CHOICE]}).encode(), []

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        waiting.append(asyncio.get_running_loop().create_future())
        mine = waiting[-1]
        if len(waiting) == NUM_REQUESTS:
            for future in waiting:
                future.set_result(None)
            waiting.clear()
        await mine
        return web.Response(body=answer, content_type="application/json")

    async def load(request: web.Request) -> web.Response:
        return web.json_response({"server_load": len(waiting)})

    application = web.Application()
    application.add_routes([web.post(GENERATE, complete), web.get("/load", load)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2 * NUM_REQUESTS).start()
    pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.Event().wait()


def run_server(pipe: Connection) -> None:
    asyncio.run(serve(pipe))


async def measure(url: str) -> None:
    """Print the seconds of the requests."""
    seconds, cpu_seconds, fresh, kept = [], [], [], []
    async with http_client(url, "token", 60.0, 60.0) as http:
        engine = Engine(url, http, health_timeout=60.0, stall_timeout=60.0)
        for _ in range(NUM_ROUNDS):
            begun, used = time.perf_counter(), time.process_time()
            completions = (engine.complete(REQUEST, lambda: range(1)) for _ in range(NUM_REQUESTS))
            await asyncio.gather(*completions)
            seconds.append(time.perf_counter() - begun)
            cpu_seconds.append(time.process_time() - used)
        for _ in range(NUM_SINGLE):
            begun = time.perf_counter()
            await engine.num_open_requests()
            kept.append(time.perf_counter() - begun)
    for _ in range(NUM_SINGLE):
        begun = time.perf_counter()
        async with http_client(url, "token", 60.0, 60.0) as http:
            await Engine(url, http, 60.0, 60.0).num_open_requests()
        fresh.append(time.perf_counter() - begun)
    print(f"{NUM_REQUESTS} requests at once, {min(seconds):.3f} s, {min(cpu_seconds):.3f} s of CPU")
    print(f"one request, client just made: {1000 * median(fresh):.2f} ms")
    print(f"one request, client kept: {1000 * median(kept):.2f} ms")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(theirs,), daemon=True)
    server.start()
    run(measure(ours.recv()))
    server.kill()


if __name__ == "__main__":
    main()
