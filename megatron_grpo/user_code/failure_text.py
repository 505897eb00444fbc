"""What is told of the user's code when it has failed.

`limit` is that of memory by its key, such as `reward.memory_megabytes 512`.
"""

import traceback

from megatron_grpo.launch.exit_status import exit_words

MAX_TEXT = 4000
"""Characters of an error that are told: its end, where a traceback says what happened."""


def error_text(error: BaseException, limit: str) -> str:
    """Of what it has raised."""
    if isinstance(error, MemoryError):
        return f"more memory than {limit} allows"
    return "".join(traceback.format_exception(error)).rstrip()[-MAX_TEXT:]


def death_text(code: int | None, limit: str) -> str:
    """Of a process that answers no more; `code` as `subprocess` has it, None while it lives."""
    if code is None:
        return "its process has closed the connection to the trainer"
    died = f"its process died with {exit_words(code)}"
    return f"{died} (its limit was {limit})" if code < 0 else died
