"""Actors of a session: `agent.command`, `agent.function`, or a loop that answers with tools.

Each sample has its own process: an instance of a `ForkPool`, which forks, limits and kills it. Its
only call is `run_episode`, which lasts as long as the agent acts.
"""

import asyncio
import inspect
import json
import os
import reprlib
import shlex
import shutil
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

from megatron_grpo.agents.tools import Tools, converse, load_tool, python_schema
from megatron_grpo.config.agent import PYTHON
from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.sandbox import Sandbox
from megatron_grpo.workers.user_file import finite_number, load_user_file
from parallel.clock import run

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Message = dict[str, Any]
NOTHING: Mapping[str, Any] = {}
MAX_LINES = 200
"""Number of last lines kept of a program's output."""
MAX_LINE = 1 << 16


class Actor:
    """Acts in one session; `run_episode` gets the session's address and key."""

    def __init__(
        self,
        command: str | None,
        function: str | None,
        tools: Sequence[str],
        mcp_servers: Sequence[str],
        max_tool_characters: int,
        python_arguments: Mapping[str, Any] = NOTHING,
    ) -> None:
        self._command, self._function = command, function
        sandbox = Sandbox(**python_arguments)
        self._tools = Tools(tools, mcp_servers, max_tool_characters, sandbox)

    @classmethod
    def load(
        cls,
        command: str | None,
        function: str | None,
        tools: Sequence[str],
        mcp_servers: Sequence[str],
        python_arguments: Mapping[str, Any] = NOTHING,
        **_: Any,
    ) -> None:
        """Import once what every agent needs; raises ValueError for a missing program or import."""
        if command is not None:
            program = shlex.split(command)[0]
            if shutil.which(program) is None:
                why = "is not executable" if Path(program).exists() else "does not exist"
                raise ValueError(f"agent.command {command!r}: the program {program} {why}")
            return
        # Not `parallel.clock.run`, which starts a thread: this process forks, and a forked child
        # would not have the thread.
        asyncio.run(_ask_nobody())
        if function is not None:
            load_function(function)
        for name in tools:
            if name == PYTHON:
                python_schema()
                asyncio.run(Sandbox(**python_arguments).check())
            else:
                load_tool(name)
        if mcp_servers:
            import mcp  # noqa: F401, PLC0415

    def run_episode(
        self,
        url: str = "",
        key: str = "",
        row: Mapping[str, Any] = NOTHING,
        messages: Sequence[Message] = (),
    ) -> dict[str, Any]:
        """Act on a row, or have the model answer `messages` with tools; returns `checked`."""
        if self._command is not None:
            addresses = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
            keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key)
            return checked(run_command(shlex.split(self._command), addresses | keys, row))
        return checked(run(self._act(url, key, row, messages)))

    async def _act(
        self, url: str, key: str, row: Mapping[str, Any], messages: Sequence[Message]
    ) -> Any:
        async with client_of(url, key) as client:
            if self._function is not None:
                return await load_function(self._function)(client, row)
            async with self._tools as tools:
                metrics = await converse(client, messages, tools)
            return {"reward": None, "metrics": metrics}


def client_of(url: str, key: str) -> "AsyncOpenAI":
    """A client of the endpoint at `url`, for the session with this key."""
    # Commands do not need this package, and its import takes a second.
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # noqa: PLC0415

    # Plain HTTP: `verify` would read certificates for 0.1 s. Proxies cannot reach this address.
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    # A retry would be one more turn of the session; agent.timeout limits the whole episode.
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=None, http_client=http
    )


async def _ask_nobody() -> None:
    """Send a request that fails: the client's late imports happen here, before processes fork."""
    from openai import APIConnectionError  # noqa: PLC0415

    with socket.socket() as nobody:  # bound, not listening: the connection is refused at once
        nobody.bind(("127.0.0.1", 0))
        _, port = nobody.getsockname()
        async with client_of(f"http://127.0.0.1:{port}", "none") as client:
            with suppress(APIConnectionError):
                await client.chat.completions.create(model="policy", messages=[])


@cache
def load_function(name: str) -> Callable[..., Any]:
    """Import `file.py:function`; raises ValueError unless it is `async` and takes two arguments."""
    path, _, function_name = name.rpartition(":")
    found = getattr(load_user_file(Path(path), "file of an agent"), function_name, None)
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{path} has no async function {function_name!r}")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError:
        raise ValueError(f"{name} must take a client and a row of the data") from None
    return found


def run_command(command: list[str], variables: Mapping[str, str], row: Mapping[str, Any]) -> Any:
    """Run a program with `row` as JSON on stdin; returns the last line of its stdout, parsed as
    JSON, or None without output. Raises ValueError with the end of its stderr if it fails."""
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise ValueError(f"agent.command {command[0]} cannot be started: {error}") from None
    assert process.stdin and process.stdout and process.stderr
    outputs = [_Tail(process.stdout), _Tail(process.stderr)]
    try:
        with process.stdin as stdin:
            stdin.write(json.dumps(row, default=str).encode())
    except BrokenPipeError:  # a program need not read its row
        pass
    code = process.wait()
    printed, errors = (output.lines() for output in outputs)
    if code:
        raise ValueError(f"it ended with exit code {code}; its stderr ends with\n{errors}")
    lines = [line for line in printed.splitlines() if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise ValueError(
            f"the last line of its output is no reward in JSON: {reprlib.repr(lines[-1])}"
        ) from None


def checked(outcome: Any) -> dict[str, Any]:
    """Check an agent's result: a reward, or an object with `reward` and `metrics` (numbers by
    name). Raises ValueError for anything else."""
    outcome = outcome if isinstance(outcome, Mapping) else {"reward": outcome}
    metrics, reward = outcome.get("metrics") or {}, outcome.get("reward")
    if not isinstance(metrics, Mapping):
        raise ValueError(f"its metrics {reprlib.repr(metrics)} are not numbers by name")
    return {
        "reward": None if reward is None else _number("reward", reward),
        "metrics": {
            as_unicode(str(name)): _number(f"metric {name}", value)
            for name, value in metrics.items()
        },
    }


def _number(what: str, value: Any) -> float:
    if (number := finite_number(value)) is None:
        raise ValueError(f"its {what} {reprlib.repr(value)} is not a finite number")
    return number


class _Tail:
    """Last lines of a stream. A thread reads it: a full pipe would block the program."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._lines: deque[bytes] = deque(maxlen=MAX_LINES)
        self._thread = Thread(target=self._read, args=[stream], daemon=True)
        self._thread.start()

    def lines(self) -> str:
        """Kept lines of a program that has ended."""
        self._thread.join(1.0)  # not for ever: a child of the program may hold the pipe open
        return b"".join([*self._lines]).decode(errors="replace")

    def _read(self, stream: IO[bytes]) -> None:
        while line := stream.readline(MAX_LINE):
            self._lines.append(line)
