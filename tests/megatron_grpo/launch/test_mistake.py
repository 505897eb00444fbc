import errno

import pytest

from megatron_grpo.engines.http import EngineError
from megatron_grpo.launch.process import is_user_error


@pytest.mark.parametrize(
    "error",
    [ValueError("lower it"), FileNotFoundError(errno.ENOENT, "x"), OSError(errno.ENOSPC, "full")],
)
def test_somebody_has_to_mend_it(error):
    assert is_user_error(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "of a file"),
        OSError(errno.ESTALE, "of a file"),
        OSError(errno.ETIMEDOUT, "of a file"),
        ConnectionRefusedError(errno.ECONNREFUSED, "of a hub"),
        EngineError("rollout engine http://a refuses"),
        RuntimeError("of ours"),
    ],
)
def test_the_same_command_may_do(error):
    assert not is_user_error(error)
