"""Tools in turns that the engine's own parser reads, in a real conversation."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers.engines.live import wait_until
from helpers.engines.proxies import DEAD, set_proxies
from helpers.runs.agents import MCP_SERVER
from helpers.runs.sandboxes import needs_bubblewrap
from megatron_grpo.agents.tools import Tools
from megatron_grpo.workers.sandbox import Sandbox

TOOLS = '''
import asyncio

eight = asyncio.Barrier(8)

def add(a: int, b: int) -> int:
    """Adds numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def repeat(text: str, times: int) -> str:
    """Repeats a text.

    Args:
        text: What to repeat.
        times: How often.
    """
    await eight.wait()
    await asyncio.sleep(0.1)
    return text * times

def name() -> str:
    """Tells the name of a file."""
    return b"caf\\xe9".decode("utf-8", "surrogateescape")

def size(text: str) -> int:
    """Counts bytes.

    Args:
        text: Whose.
    """
    return len(text.encode())

def bare(a): return a

def words(text: str):
    """Yields words.

    Args:
        text: What to split.
    """
    yield from text.split()

class Untold(Exception):
    def __str__(self): raise SystemExit

class Unshown:
    def __str__(self): raise LookupError("not shown")

def odd(kind: str) -> object:
    """Returns or raises what a tool had better not.

    Args:
        kind: What.
    """
    import numpy
    if kind == "awaitable":
        return odd_later("text")
    circle = []
    circle.append(circle)
    outcome = {
        "keys": {(1, 2): 3},
        "circle": circle,
        "unshown": Unshown(),
        "generator": words("a b"),
        "text": "slept",
        "array": {"a": numpy.arange(2), "b": {1}, "c": b"x", "d": float("nan")},
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "base": BaseException("base"),
        "close": GeneratorExit(),
        "cancel": asyncio.CancelledError(),
        "stop": StopIteration(),
        "untold": Untold(),
    }[kind]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome

async def odd_later(kind: str) -> object:
    """As odd.

    Args:
        kind: What.
    """
    return odd(kind)
'''
ODD = {
    "keys": "Error: TypeError: keys must be str",
    "circle": "Error: ValueError: Circular reference",
    "unshown": "Error: LookupError: not shown",
    "generator": "Error: TypeError: a result with a generator: return a list",
    "array": '{"a": [0, 1], "b": "{1}", "c": "b\'x\'", "d": NaN}',
    "exit": "Error: SystemExit: 3",
    "interrupt": "Error: KeyboardInterrupt: ",
    "base": "Error: BaseException: base",
    "close": "Error: GeneratorExit: ",
    "cancel": "Error: CancelledError: ",
    "stop": "Error: ",
    "untold": "Error: Untold: its text cannot be had (SystemExit)",
}
"""The message to the model, by kind of return value or error."""


@pytest.fixture
def file(tmp_path) -> Path:
    """A file with the functions of `TOOLS`."""
    (file := tmp_path / "tools.py").write_text(TOOLS)
    return file


def run_with(names: list, act, servers: Sequence[str] = (), **options):
    """Return value of `act` with these tools, within a minute."""

    async def run():
        async with Tools(
            [*map(str, names)], servers, **{"most_characters": 100} | options
        ) as tools:
            return await act(tools)

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_calls_run_concurrently_are_cut_and_return_errors(file):
    async def call_all(tools):
        assert [schema["function"]["name"] for schema in tools.schemas] == ["add", "repeat"]
        many = [tools.call("repeat", '{"text": "x", "times": 12}') for _ in range(8)]
        assert await asyncio.gather(*many) == ["x" * 10 + "... (2 more characters)"] * 8
        assert await tools.call("add", '{"a": 1, "b": 2}') == "3"
        for arguments in ("{", "[1]", '{"a": 1}', '{"a": 1, "b": 2, "c": 3}'):
            assert (await tools.call("add", arguments)).startswith("Error: ")
        assert (await tools.call("sum", "{}")).startswith("Error: Val")
        return tools.metrics

    metrics = run_with([f"{file}:add", f"{file}:repeat"], call_all, most_characters=10)
    assert (metrics["tool/add/calls"], metrics["tool/add/errors"]) == (5, 4)
    assert (metrics["tool/repeat/calls"], metrics["tool/repeat/errors"]) == (8, 0)
    assert metrics["tool/repeat/seconds"] > 8 * 0.1
    assert metrics["tool/unknown/calls"] == 1


def test_call_replaces_half_of_a_surrogate_pair_on_both_sides_of_a_tool(file):
    async def call_both(tools):
        return await tools.call("name", "{}"), await tools.call("size", '{"text": "\\ud83d"}')

    assert run_with([f"{file}:name", f"{file}:size"], call_both) == ("caf?", "1")


@pytest.mark.parametrize("tool", ["odd", "odd_later"])
def test_the_model_gets_whatever_a_tool_returns_or_raises(tool, file):
    async def call_all(tools):
        results = {kind: await tools.call(tool, json.dumps({"kind": kind})) for kind in ODD}
        if tool == "odd":
            assert await tools.call(tool, '{"kind": "awaitable"}') == "slept"
        return results, tools.metrics[f"tool/{tool}/errors"]

    results, num_errors = run_with([f"{file}:{tool}"], call_all)
    assert all(results[kind].startswith(text) for kind, text in ODD.items()), results
    assert num_errors == len(ODD) - 1


def test_a_call_that_is_cancelled_is_over(file):
    async def cancel(tools):
        call = asyncio.create_task(tools.call("repeat", '{"text": "x", "times": 1}'))
        await asyncio.sleep(0)  # it waits for seven others
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run_with([f"{file}:repeat"], cancel)


@needs_bubblewrap
def test_the_tool_python_returns_output_and_errors_of_a_program():
    async def call_all(tools):
        [schema] = tools.schemas
        assert [*schema["function"]["parameters"]["properties"]] == ["code"]
        programs = ["print(6 * 7)", "1 / 0", "x = 1", "print(1)\nwhile True: pass"]
        calls = [tools.call("python", json.dumps({"code": program})) for program in programs]
        return await asyncio.gather(*calls)

    sandbox = Sandbox(timeout=5)
    printed, failed, nothing, late = run_with(
        ["python"], call_all, most_characters=1000, sandbox=sandbox
    )
    assert printed == "42"
    assert failed.endswith("ZeroDivisionError: division by zero")
    assert nothing == "The program has printed nothing."
    assert late == "The program was stopped after 5 seconds."  # its buffered output is lost


@pytest.fixture
def at_an_address(tmp_path) -> Iterator[str]:
    """The address of an MCP server on loopback, which a proxy does not reach."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    over_http = f'server.run("streamable-http", port={port})'
    (file := tmp_path / "http_server.py").write_text(MCP_SERVER.replace("server.run()", over_http))
    with subprocess.Popen([sys.executable, file], stderr=subprocess.DEVNULL) as server:
        try:
            assert wait_until(lambda: is_open(port), 60)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.kill()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def at_a_command(tmp_path) -> str:
    (file := tmp_path / "server.py").write_text(MCP_SERVER)
    return f"{sys.executable} {file}"


@pytest.mark.parametrize("kind", ["at_a_command", "at_an_address"])
def test_the_tools_of_an_mcp_server_are_called(kind, request, monkeypatch):
    set_proxies(monkeypatch, http_proxy=DEAD, ALL_PROXY="socks5://127.0.0.1:9")

    async def call_all(tools):
        functions = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
        assert functions["double"]["description"] == "Doubles a number."
        assert [*functions["double"]["parameters"]["properties"]] == ["number"]
        assert await tools.call("double", '{"number": 21}') == "42"
        assert await tools.call("fail", "{}") == "Error: RuntimeError: Error executing tool fail"

    run_with([], call_all, [request.getfixturevalue(kind)])


async def no_call(tools):
    pass


@pytest.mark.parametrize(
    ("function", "error"),
    [("bare", "use type hints, and a docstring"), ("words", "words is a generator")],
)
def test_a_function_without_a_schema_is_refused(function, error, file):
    with pytest.raises(ValueError, match=error):
        run_with([f"{file}:{function}"], no_call)


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ("nowhere --x", "FileNotFoundError.*nowhere"),
        ("false", "Connection closed"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ],
)
def test_a_missing_mcp_server_is_named_in_one_line(server, error, at_a_command):
    with pytest.raises(ValueError, match=error) as refused:
        run_with([], no_call, [at_a_command, server])
    assert str(refused.value).startswith(f"agent.mcp_servers: {server!r} cannot be used: ")
    assert "\n" not in str(refused.value)
