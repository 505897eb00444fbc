"""Who acts in a session: an `agent.command` or an `agent.function`, in a process of its own.

The process of a sample is an instance of the environments' pool, which forks, limits and kills it.
Its only call is `reset`, which lasts as long as the agent acts and returns the reward, in JSON.
"""

import asyncio
import inspect
import json
import math
import os
import reprlib
import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from threading import Thread
from typing import IO, Any

from megatron_grpo.workers.user_file import load_user_file

MAX_LINES = 200
"""Last lines kept of what a program writes."""
MAX_LINE = 1 << 16


class Actor:
    """An environment that acts by itself; `reset` gets the address and the key of its session."""

    def __init__(self, command: str | None = None, function: str | None = None) -> None:
        self._command, self._function = command, function

    @classmethod
    def load(cls, command: str | None, function: str | None) -> None:
        """Import what every agent needs, once; raises ValueError if it is not there."""
        if command is not None and shutil.which(shlex.split(command)[0]) is None:
            raise ValueError(f"agent.command {command!r}: there is no such program")
        if function is not None:
            import openai  # noqa: F401, PLC0415

            load_function(function)

    def reset(self, url: str = "", key: str = "", row: Mapping[str, Any] | None = None) -> str:
        """Act; returns the reward in JSON."""
        if self._command is not None:
            reward = run_command(shlex.split(self._command), variables_of(url, key), row or {})
        else:
            assert self._function is not None
            reward = asyncio.run(_act(load_function(self._function), url, key, row or {}))
        return json.dumps(checked_reward(reward))

    def step(self, text: str) -> None:
        """Never called."""


def variables_of(url: str, key: str) -> dict[str, str]:
    """What tells the clients of both APIs where to ask."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
    }


@cache
def load_function(name: str) -> Callable[..., Any]:
    """Import `file.py:function`; raises ValueError if it is not an async function of two."""
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
    """The last line that a program writes, read as JSON; None if it writes nothing.

    Raises ValueError if it fails, with the end of what it wrote to stderr.
    """
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
    except BrokenPipeError:  # it does not read its row
        pass
    code = process.wait()
    told, errors = (output.lines() for output in outputs)
    if code:
        raise ValueError(f"it ended with exit code {code}; its stderr ends with\n{errors}")
    lines = [line for line in told.splitlines() if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise ValueError(
            f"the last line that it wrote is no reward in JSON: {reprlib.repr(lines[-1])}"
        ) from None


def checked_reward(reward: Any) -> float | None:
    """The reward, also of an object with a `reward`; raises ValueError if it is none."""
    if isinstance(reward, Mapping):
        reward = reward.get("reward")
    if reward is None:
        return None
    try:
        if not isinstance(reward, str) and math.isfinite(reward):
            return float(reward)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"its reward {reprlib.repr(reward)} is not a finite number")


async def _act(function: Callable[..., Any], url: str, key: str, row: Mapping[str, Any]) -> Any:
    # Only agents that are functions need this package, and it takes a second.
    from openai import AsyncOpenAI  # noqa: PLC0415

    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=None
    ) as client:
        return await function(client, row)


class _Tail:
    """The last lines of a stream, read by a thread of its own, so that a program can write on."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._lines: deque[bytes] = deque(maxlen=MAX_LINES)
        self._thread = Thread(target=self._read, args=[stream], daemon=True)
        self._thread.start()

    def lines(self) -> str:
        """All that is kept, once the stream is closed or no longer read."""
        self._thread.join(1.0)  # a process that it has left behind may hold it open
        return b"".join([*self._lines]).decode(errors="replace")

    def _read(self, stream: IO[bytes]) -> None:
        while line := stream.readline(MAX_LINE):
            self._lines.append(line)
