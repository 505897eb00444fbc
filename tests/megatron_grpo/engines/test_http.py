"""The trainer's HTTP connections to an engine."""

import asyncio

from megatron_grpo.engines.http import NUM_POOLS, http_client

NUM_REQUESTS = 100


def test_all_requests_are_open_at_once_and_few_connections_stay():
    async def run() -> tuple[int, int]:
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
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            except asyncio.IncompleteReadError:
                num_open -= 1
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with http_client(f"http://127.0.0.1:{port}", "token", 30.0, 30.0) as http:
            await asyncio.gather(*(http.get("/") for _ in range(NUM_REQUESTS)))
            async with asyncio.timeout(30):
                while num_open > NUM_POOLS:
                    await asyncio.sleep(0.01)
        return most, num_open

    most, left = asyncio.run(run())
    assert most == NUM_REQUESTS
    assert 0 < left <= NUM_POOLS
