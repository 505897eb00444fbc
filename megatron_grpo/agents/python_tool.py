"""The built-in tool `python`."""

from collections.abc import Awaitable, Callable

from megatron_grpo.workers.sandbox import Sandbox


def python_tool(sandbox: Sandbox) -> Callable[[str], Awaitable[str]]:
    """The tool, whose programs run in `sandbox`."""

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
