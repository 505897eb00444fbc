"""How a process has ended, in words."""

import signal


def exit_words(code: int) -> str:
    """`exit code N` or `signal NAME`, of what `subprocess` calls a return code."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
