"""Tells errors that the user has to fix from errors that may pass by themselves."""

import errno

PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""What a network file system returns while its server is away."""


def is_mistake(error: BaseException) -> bool:
    """Whether `error`, raised before the first step, is a mistake in config, model or data.

    Then the same command would fail again. After a transient error it may succeed.
    """
    if isinstance(error, (ConnectionError, TimeoutError)):
        return False
    if isinstance(error, OSError):
        return error.errno not in PASSING
    return isinstance(error, ValueError)
