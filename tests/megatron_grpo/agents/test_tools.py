"""Tools in turns that the engine's own parser reads, in a real conversation."""

import asyncio
import json
import sys

import pytest

from helpers.agents import MCP_SERVER
from helpers.sandboxes import needs_bubblewrap
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
'''


def test_calls_run_at_once_are_cut_and_tell_their_errors(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)

    async def call_all():
        names = [f"{file}:{name}" for name in ("add", "repeat")]
        async with Tools(names, [], most_characters=10) as tools:
            assert [schema["function"]["name"] for schema in tools.schemas] == ["add", "repeat"]
            many = [tools.call("repeat", '{"text": "x", "times": 12}') for _ in range(8)]
            results = await asyncio.wait_for(asyncio.gather(*many), 30)
            assert results == ["x" * 10 + "... (2 more characters)"] * 8
            assert await tools.call("add", '{"a": 1, "b": 2}') == "3"
            for arguments in ("{", "[1]", '{"a": 1}', '{"a": 1, "b": 2, "c": 3}'):
                assert (await tools.call("add", arguments)).startswith("Error: ")
            assert (await tools.call("sum", "{}")).startswith("Error: Val")
        return tools.metrics

    metrics = asyncio.run(call_all())
    assert (metrics["tool/add/calls"], metrics["tool/add/errors"]) == (5, 4)
    assert (metrics["tool/repeat/calls"], metrics["tool/repeat/errors"]) == (8, 0)
    assert metrics["tool/repeat/seconds"] > 8 * 0.1
    assert metrics["tool/unknown/calls"] == 1


def test_half_of_a_surrogate_pair_is_replaced_on_both_sides_of_a_tool(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)

    async def call_all():
        async with Tools([f"{file}:name", f"{file}:size"], [], most_characters=100) as tools:
            return await tools.call("name", "{}"), await tools.call("size", '{"text": "\\ud83d"}')

    assert asyncio.run(call_all()) == ("caf?", "1")


@needs_bubblewrap
def test_the_tool_python_tells_what_a_program_prints_and_how_it_fails():
    async def call_all():
        sandbox = Sandbox(timeout=5)
        async with Tools(["python"], [], most_characters=1000, sandbox=sandbox) as tools:
            [schema] = tools.schemas
            assert [*schema["function"]["parameters"]["properties"]] == ["code"]
            programs = ["print(6 * 7)", "1 / 0", "x = 1", "print(1)\nwhile True: pass"]
            calls = [tools.call("python", json.dumps({"code": program})) for program in programs]
            return await asyncio.gather(*calls)

    printed, failed, nothing, late = asyncio.run(call_all())
    assert printed == "42"
    assert failed.endswith("ZeroDivisionError: division by zero")
    assert nothing == "The program has printed nothing."
    assert late == "The program was stopped after 5 seconds."  # what it had in its buffer is lost


def test_the_tools_of_an_mcp_server_are_called(tmp_path):
    file = tmp_path / "server.py"
    file.write_text(MCP_SERVER)

    async def call_all():
        async with Tools([], [f"{sys.executable} {file}"], most_characters=100) as tools:
            told = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
            assert told["double"]["description"] == "Doubles a number."
            assert [*told["double"]["parameters"]["properties"]] == ["number"]
            assert await tools.call("double", '{"number": 21}') == "42"
            failed = await tools.call("fail", "{}")
            assert failed == "Error: RuntimeError: Error executing tool fail"

    asyncio.run(asyncio.wait_for(call_all(), 60))


def test_a_function_that_the_model_cannot_be_told_of_is_refused(tmp_path):
    (file := tmp_path / "tools.py").write_text(TOOLS)

    async def enter():
        async with Tools([f"{file}:bare"], [], most_characters=10):
            pass

    with pytest.raises(ValueError, match="it needs type hints, and a docstring"):
        asyncio.run(enter())
