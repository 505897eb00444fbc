"""The agent: the keys of `agent`."""

import shlex
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_grpo.config.section import Section

AGENT = "agent"
"""`Config.partner` of a run with agents, and the label of the reward that an agent gives itself;
those of reward functions must differ from it."""

PYTHON = "python"
"""The built-in tool."""
PYTHON_ARGUMENTS = ("timeout", "memory_megabytes", "python", "sandbox")

MOST_PORT = 65535

LIMITS = ("context_length_exceeded", "limit_reached")
"""Codes of the endpoint's answers to requests beyond a limit, after which an agent may end well.
The first is OpenAI's."""


class AgentConfig(Section):
    """The agent: your program, which asks an OpenAI-compatible endpoint for the model's turns."""

    command: str | None = None
    """A program that is started for each sample, such as `python agent.py`: a row of the data is
    JSON on its stdin, and OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
    are set. The last line of its stdout is its reward, in JSON. No shell."""
    function: str | None = None
    """Instead of a command, `file.py:function`: an async function of an `openai.AsyncOpenAI` client
    and a row of the data, which returns the reward."""
    tools: tuple[str, ...] = Field(default=(), strict=False)
    """Instead of an agent, functions that the model may call: `python`, which runs programs of the
    model under bubblewrap, or `file.py:function`, with type hints and a docstring that describes
    it and its `Args:`. Needs rollout.tool_call_parser."""
    python_arguments: dict[str, Any] = Field(default={})
    """Arguments of the tool `python`: `timeout` (10 seconds), `memory_megabytes` (1024), `python`
    (the interpreter); with `sandbox: none` programs run unsandboxed, with your rights."""
    mcp_servers: tuple[str, ...] = Field(default=(), strict=False)
    """MCP servers whose tools it may call: commands, started for each sample, or addresses."""
    listen: str | None = None
    """Instead of an agent, `HOST:PORT`, where agents outside of the run take tasks over HTTP; port
    0: any. Address and token are in `agents.json` of the run directory."""
    max_tool_characters: PositiveInt = 16384
    """Maximum characters of a tool's result; the rest is cut."""
    weight: float = 1.0
    """Weight of the agent's own reward, term `agent` of the total; 0: it gives none, as with
    tools."""
    max_turns: PositiveInt = 64
    """Maximum turns of the model per sample."""
    max_tokens: PositiveInt | None = None
    """Sampled tokens of a sample, all turns together, after which it gets no further turn."""
    timeout: PositiveFloat = 600.0
    """Seconds within which an agent must end; otherwise the sample has failed."""
    memory_megabytes: PositiveInt = 4096
    """Maximum private memory (RLIMIT_DATA) of each process of an agent."""
    on_rewrite: Literal["branch", "drop"] = "branch"
    """If an agent sends messages that are not the ones it had with others appended: `branch` trains
    on what it has sampled before and after, `drop` on none of it."""

    @property
    def is_used(self) -> bool:
        """Whether samples are made by an agent."""
        return any(self._actors.values())

    @property
    def address(self) -> tuple[str, int]:
        """Where the endpoint listens."""
        host, _, port = (self.listen or "127.0.0.1:0").rpartition(":")
        return host, int(port)

    @property
    def _actors(self) -> dict[str, bool]:
        """By the keys that say so, whether it is they who act."""
        return {
            "agent.command": self.command is not None,
            "agent.function": self.function is not None,
            "agent.tools or agent.mcp_servers": self.has_tools,
            "agent.listen": self.listen is not None,
        }

    @property
    def has_tools(self) -> bool:
        """Whether the model calls tools without a program of the user's."""
        return bool(self.tools or self.mcp_servers)

    @field_validator("python_arguments")
    @classmethod
    def _are_known(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name not in PYTHON_ARGUMENTS:
                known = ", ".join(PYTHON_ARGUMENTS)
                raise ValueError(f"agent.python_arguments has {name!r}: it may have {known}")
        return value

    @field_validator("command")
    @classmethod
    def _is_words(cls, value: str | None) -> str | None:
        try:
            if value is None or shlex.split(value):
                return value
        except ValueError as error:  # such as a quotation that does not end
            raise ValueError(f"agent.command {value!r}: {error}") from None
        raise ValueError("agent.command is empty: name a program, such as `python agent.py`")

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            if not host or not port.isdecimal() or int(port) > MOST_PORT:
                raise ValueError(f"agent.listen {value!r} is not of the form HOST:PORT")
        return value

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not all(value.rpartition(":")):
            raise ValueError(f"agent.function {value!r} is not of the form file.py:function")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        used = [name for name, is_used in self._actors.items() if is_used]
        if len(used) > 1:
            raise ValueError(f"{used[0]} and {used[1]} are both set: use one of them")
        if self.has_tools and self.weight:
            raise ValueError(
                f"agent.weight {self.weight}: no agent of yours gives a reward beside tools: set "
                "agent.weight=0, and name reward functions"
            )
        return self
