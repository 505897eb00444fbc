"""A vLLM for CPUs: weights of dense models stay as they were loaded, fewer processes are started
anew, each of which would import all of vLLM once more, and none leaves shared memory behind."""

import glob
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path

import torch
import vllm._custom_ops
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.models import registry
from vllm.utils import cpu_triton_utils
from vllm.v1.engine import utils as engine_utils

from megatron_grpo.launch.parent_death import die_with_parent


def keep_weights_unpacked() -> None:
    """Make vLLM's linear layers compute with `layer.weight` itself, as its CUDA layers do.

    By default vLLM packs linear weights for oneDNN or SGL kernels after loading and leaves an empty
    parameter behind, so that weights loaded later never reach the packed copies (including that of
    a tied lm_head).
    """
    vllm._custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def judge_drafts_at_temperatures() -> None:
    """Give every draft token the value of its request, such as its temperature.

    vLLM 0.32 puts them into a copy of `output` in integers, which it drops: the probabilities by
    which it takes or rejects draft tokens would be of whatever is in memory.
    """

    def expand(
        output: Tensor,
        values: Tensor,
        ends: Tensor,
        replaced: int,
        replacement: int,
        max_tokens: int,
    ) -> None:
        counts = ends.diff(prepend=ends.new_zeros(1))  # `ends` [requests] of their draft tokens
        values = torch.where(values == replaced, replacement, values)
        output.copy_(values.repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand


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
