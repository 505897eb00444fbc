"""The processes of a vLLM for CPUs: fewer are started anew, each of which would import all of vLLM
once more, and none leaves shared memory behind."""

import glob
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path

from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.models import registry
from vllm.v1.engine import utils as engine_utils

from megatron_grpo.launch.parent_death import die_with_parent


def examine_models_here() -> None:
    """Let vLLM look at the class of its model in this process.

    By default it starts another the first time, lest CUDA be initialized, which imports all of vLLM
    for it.
    """
    registry._run_in_subprocess = lambda examine: examine()


class _ForkedCore(ForkProcess):
    """An engine core that is tied to its API server; as a fork it has our plugin already."""

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        die_with_parent()
        # Not `is_alive()`: cores that are forked later hold the pipe that would tell.
        if parent is None or os.getppid() != parent.pid:
            sys.exit("the process that started this one has ended")
        signal.set_wakeup_fd(-1)  # its signals are not for the API server's event loop
        super().run()


class _ForkingContext(ForkContext):
    Process = _ForkedCore


def fork_cores() -> None:
    """Let the API server fork the engine's cores; by default each imports all of vLLM once more.

    With more than one thread of OpenMP, a core would hang if the API server had computed before;
    our engines on CPUs have one (`engine_environment`). Workers are started as by default.
    """
    engine_utils.get_mp_context = _ForkingContext


def unlink_group_memory() -> None:
    """Unlink the memory in which a CPU's workers reduce tensors as soon as all of them have it.

    Then it is freed with its last process, even if that is killed.
    """
    join = _CPUSHMDistributed._init_cpu_shm

    def join_and_unlink(self: _CPUSHMDistributed) -> int:
        handle: int = join(self)  # returns when all workers of the group have mapped it
        for file in Path("/dev/shm").glob(f"{glob.escape(self.group_name)}*"):
            file.unlink(missing_ok=True)
        return handle

    _CPUSHMDistributed._init_cpu_shm = join_and_unlink
