"""The agent: the keys of `agent`."""

import shlex
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_grpo.config.section import Mistake, Section

AGENT = "agent"
"""`Config.partner` of a run with agents, and the label of the agent's own reward; no reward
function may have this label."""

PYTHON = "python"
"""The built-in tool."""
PYTHON_ARGUMENTS = ("timeout", "memory_megabytes", "python", "sandbox")

MOST_PORT = 65535

LIMITS = ("context_length_exceeded", "limit_reached")
"""Codes of the endpoint's refusals of requests beyond a limit; an agent may end well after one. The
first is OpenAI's."""


class AgentConfig(Section):
    """The agent: your program, which asks an OpenAI-compatible endpoint for the model's turns."""

    command: str | None = None
    """Program started for each sample, without a shell, such as `python agent.py`. It reads a row
    of the data as JSON on stdin, finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY (or
    ANTHROPIC_*), and prints its reward in JSON as the last line."""
    function: str | None = None
    """Instead of a command, `file.py:function`: an async function of an `openai.AsyncOpenAI` client
    and a row of the data that returns the reward."""
    tools: tuple[str, ...] = Field(default=(), strict=False)
    """Instead of an agent, functions that the model may call: `python` (runs programs under
    bubblewrap) or `file.py:function` with type hints and a docstring with `Args:`. Needs
    rollout.tool_call_parser."""
    python_arguments: dict[str, Any] = Field(default={})
    """Arguments of the tool `python`: `timeout` (10 seconds), `memory_megabytes` (1024), `python`
    (the interpreter) and `sandbox`; `sandbox: none` runs programs unsandboxed, with your rights."""
    mcp_servers: tuple[str, ...] = Field(default=(), strict=False)
    """MCP servers with tools for the model: commands, started for each sample, or addresses."""
    listen: str | None = None
    """Instead of an agent, `HOST:PORT` where agents outside the run take tasks over HTTP; port 0
    picks a free one. `agents.json` in the run directory has address and token."""
    max_tool_characters: PositiveInt = 16384
    """Maximum characters of a tool's result; longer results are cut."""
    weight: float = 1.0
    """Weight of the agent's own reward, the term `agent` of the total; 0 for agents without a
    reward, and with tools."""
    max_turns: PositiveInt = 64
    """Maximum turns of the model per sample."""
    max_tokens: PositiveInt | None = None
    """Sampled tokens, over all turns, from which a sample gets no further turn; null: no limit."""
    timeout: PositiveFloat = 600.0
    """Seconds until a sample whose agent has not ended counts as failed."""
    memory_megabytes: PositiveInt = 4096
    """Maximum private memory (RLIMIT_DATA) of each process of an agent."""
    on_rewrite: Literal["branch", "drop"] = "branch"
    """When an agent changes earlier messages instead of appending: `branch` trains on the tokens
    sampled before and after the change, `drop` on none of the sample."""

    @property
    def is_used(self) -> bool:
        return any(self._actors.values())

    @property
    def address(self) -> tuple[str, int]:
        """Host and port on which the endpoint listens; port 0: any."""
        host, _, port = (self.listen or "127.0.0.1:0").rpartition(":")
        return host, int(port)

    @property
    def _actors(self) -> dict[str, bool]:
        """Whether each kind of agent is configured, by its key."""
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
            raise Mistake(
                f"agent.weight {self.weight}: tools give no reward of their own: set "
                "agent.weight=0, and name reward functions",
                "agent.weight=0",
            )
        return self
