"""Errors that somebody has to mend, and those that pass by themselves."""

import errno

PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""What a network file system answers while its server is away."""


def is_mistake(error: BaseException) -> bool:
    """Whether `error`, before the first step, is one in config, model, data or settings.

    The same command would fail again then. After an error that passes it may not.
    """
    if isinstance(error, (ConnectionError, TimeoutError)):
        return False
    if isinstance(error, OSError):
        return error.errno not in PASSING
    return isinstance(error, ValueError)
