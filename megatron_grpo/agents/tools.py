"""Tools: `python`, functions of a user's file, and tools of MCP servers."""

import asyncio
import inspect
import json
import shlex
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any

from megatron_grpo.config.agent import LIMITS, PYTHON
from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.proxies import is_here, proxy_hint
from megatron_grpo.workers.sandbox import Sandbox
from megatron_grpo.workers.user_file import load_named

Json = dict[str, Any]
Call = Callable[..., Awaitable[Any]]


@cache
def load_tool(name: str) -> tuple[Callable[..., Any], Json]:
    """Load `file.py:function`; returns the function and its schema. Raises ValueError if there is
    no such function, or if its arguments are not documented."""
    if ":" not in name:
        raise ValueError(f"agent.tools: {name!r} is no tool: use {PYTHON}, or file.py:function")
    found = load_named(name, "file of a tool")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ValueError(f"{name} is a generator: the model gets the value that a tool returns")
    return found, schema_of(found, name)


def schema_of(function: Callable[..., Any], name: str) -> Json:
    """Schema of a function in OpenAI's form, by signature and docstring; errors show `name`."""
    # Imported here: it takes seconds, and only agents with tools need it.
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema: Json = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"the tool {name} cannot be described to the model: {error}: use type hints, and a "
            "docstring with `Args:`, in Google's form"
        ) from None
    schema["function"].pop("return", None)  # transformers' addition to OpenAI's form
    return schema


class Tools:
    """Tools of one sample, with their metrics; MCP servers run while it is open.

    >>> async with Tools(["tools.py:add"], [], most_characters=100) as tools:
    ...     await tools.call("add", '{"a": 1, "b": 2}')
    '3'
    """

    def __init__(
        self,
        functions: Sequence[str],
        servers: Sequence[str],
        most_characters: int,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._names, self._servers, self._most = functions, servers, most_characters
        self._sandbox = sandbox or Sandbox()
        self._calls: dict[str, Call] = {}
        self.schemas: list[Json] = []
        """Schemas of all tools for the chat template, in OpenAI's form."""
        self.metrics: dict[str, float] = defaultdict(float)
        """`tool/NAME/calls`, `tool/NAME/errors` and `tool/NAME/seconds` of each tool."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Tools":
        for name in self._names:
            if name == PYTHON:
                function, schema = python_tool(self._sandbox), python_schema()
            else:
                function, schema = load_tool(name)
            self._add(schema, partial(_run, function))
        # `async with` calls no `__aexit__` after an error of `__aenter__`.
        try:
            for server in self._servers:
                await self._connect(server)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._stack.aclose()

    async def call(self, name: str, arguments: str) -> str:
        """Call a tool; returns its result as text, or `Error: ...` for a call that fails."""
        began, known = time.monotonic(), name in self._calls
        try:
            if not known:
                raise ValueError(f"there is no tool {name}: use {', '.join(self._calls)}")
            given = as_unicode(json.loads(arguments or "{}"))
            if not isinstance(given, dict):
                raise ValueError("arguments must be an object")
            text, is_good = _as_text(await self._calls[name](**given)), True
        except BaseException as error:  # sys.exit() of a tool, too: the model gets the error
            if _is_cancelled():  # the conversation ends, not only the call
                raise
            text, is_good = f"Error: {type(error).__name__}: {_said(error)}", False
        if known:
            self.metrics[f"tool/{name}/calls"] += 1
            self.metrics[f"tool/{name}/errors"] += not is_good
            self.metrics[f"tool/{name}/seconds"] += time.monotonic() - began
        else:  # one metric for all invented names: each would be a column of the logs
            self.metrics["tool/unknown/calls"] += 1
        text = as_unicode(text)
        if len(text) > self._most:
            cut = len(text) - self._most
            text = f"{text[: self._most]}... ({cut} more characters)"
        return text

    def _add(self, schema: Json, call: Call) -> None:
        name = schema["function"]["name"]
        if name in self._calls:
            raise ValueError(f"two tools have the name {name}")
        self._calls[name] = call
        self.schemas.append(as_unicode(schema))

    async def _connect(self, server: str) -> None:
        # An own stack: a server that fails ends here, any other with `self._stack`.
        try:
            async with AsyncExitStack() as stack:
                client = await _client_of(server, stack)
                tools = (await client.list_tools()).tools
                await self._stack.enter_async_context(stack.pop_all())
        except Exception as error:
            hint = "" if is_here(server) else proxy_hint(server)
            raise ValueError(
                f"agent.mcp_servers: {server!r} cannot be used: {_first_cause(error)}{hint}"
            ) from None
        for tool in tools:
            schema = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            self._add(
                {"type": "function", "function": schema}, partial(_ask_server, client, tool.name)
            )


async def converse(client: Any, messages: Sequence[Json], tools: Tools) -> Mapping[str, float]:
    """Have the model answer `messages` with tools, until a turn calls none; returns metrics.

    Calls of one turn run at the same time. A limit of the session ends the conversation without a
    failure. `client` is an AsyncOpenAI.
    """
    from openai import BadRequestError  # noqa: PLC0415

    dialogue = [*messages]
    while True:
        try:
            answer = await client.chat.completions.create(
                model="policy", messages=dialogue, tools=tools.schemas
            )
        except BadRequestError as error:
            if error.code not in LIMITS:
                raise
            return tools.metrics
        message = answer.choices[0].message
        if not message.tool_calls:
            return tools.metrics
        dialogue.append(message.model_dump(exclude_none=True))
        calls = [(call.id, call.function) for call in message.tool_calls]
        results = await asyncio.gather(*(tools.call(f.name, f.arguments) for _, f in calls))
        dialogue += [
            {"role": "tool", "tool_call_id": name, "content": result}
            for (name, _), result in zip(calls, results, strict=True)
        ]


async def _client_of(server: str, stack: AsyncExitStack) -> Any:
    """Connect to an MCP server, a command or a URL, until `stack` is closed."""
    # Imported here: only agents with MCP servers need this package.
    from mcp import Client, StdioServerParameters, stdio_client  # noqa: PLC0415

    if not server.startswith(("http://", "https://")):
        command, *args = shlex.split(server)
        target: Any = stdio_client(StdioServerParameters(command=command, args=args))
    elif is_here(server):  # no proxy of the environment reaches it
        from httpx2 import AsyncClient  # noqa: PLC0415
        from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

        http = AsyncClient(trust_env=False, timeout=None)  # agent.timeout limits all
        target = streamable_http_client(server, http_client=await stack.enter_async_context(http))
    else:
        target = server
    return await stack.enter_async_context(Client(target))


def _first_cause(error: BaseException) -> str:
    """Text of the first error inside the exception groups of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _run(function: Callable[..., Any], /, **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    # In a thread: the calls of one turn run at the same time.
    result, raised = await asyncio.to_thread(_attempt, partial(function, **arguments))
    if raised:
        raise raised
    return await result if inspect.isawaitable(result) else result


def _attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return errors of a thread: a GeneratorExit in its future would end the conversation."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def _as_text(result: Any) -> str:
    """Write a tool's result as text or JSON; raises TypeError or ValueError if it cannot be."""
    return result if isinstance(result, str) else json.dumps(result, default=_plain)


def _plain(value: Any) -> Any:
    """Replace a value that JSON lacks: an array by its numbers, any other value by its text."""
    if isinstance(value, Iterator | AsyncIterator):
        raise TypeError(f"a result with a {type(value).__name__}: return a list")
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as other:  # `__str__` of an exception in the tool's file is user code
        return f"its text cannot be had ({type(other).__name__})"


def _is_cancelled() -> bool:
    """Whether this task was cancelled from outside; a tool may raise CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _ask_server(client: Any, name: str, /, **arguments: Any) -> str:
    result = await client.call_tool(name, arguments)
    text = "".join(part.text for part in result.content if part.type == "text")
    if result.is_error:
        raise RuntimeError(text)
    return text


@cache
def python_schema() -> Json:
    """Schema of the tool `python`, in OpenAI's form."""
    return schema_of(python_tool(Sandbox()), PYTHON)


def python_tool(sandbox: Sandbox) -> Call:
    """The tool `python`: runs programs in `sandbox`."""

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Each program starts anew.

        Args:
            code: The program. It has to print its results.
        """
        outcome = await sandbox.run(code)
        said = [outcome.stdout, outcome.stderr]
        if outcome.exit_code is None:
            said.append(f"The program was stopped after {sandbox.timeout:g} seconds.")
        elif not any(said):
            said.append("The program has printed nothing.")
        return "\n".join(text.rstrip("\n") for text in said if text)

    return python
