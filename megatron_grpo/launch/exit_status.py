"""How a process ended, in words."""

import signal


def exit_words(code: int) -> str:
    """`exit code N` or `signal NAME`, for a return code of `subprocess`."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
