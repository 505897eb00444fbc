"""Error texts about user code that has failed.

`limit` is the memory limit with its config key, such as `reward.memory_megabytes 512`.
"""

import traceback

from megatron_grpo.launch.exit_status import exit_words

MAX_TEXT = 4000
"""Characters kept of an error: its end, where a traceback says what happened."""


def error_text(error: BaseException, limit: str) -> str:
    """The text of an exception that user code has raised."""
    if isinstance(error, MemoryError):
        return f"more memory than {limit} allows"
    return "".join(traceback.format_exception(error)).rstrip()[-MAX_TEXT:]


def death_text(code: int | None, limit: str) -> str:
    """The text for a process that stopped answering; `code` as in `subprocess`, None if alive."""
    if code is None:
        return "its process has closed the connection to the trainer"
    died = f"its process died with {exit_words(code)}"
    return f"{died} (its limit was {limit})" if code < 0 else died
