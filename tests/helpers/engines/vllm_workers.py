"""vLLM workers without an engine, for tests of the parameters that each worker holds.

A rank of a test makes the same worker as an engine would: vLLM's own wrapper, with our worker
extension, sets up vLLM's groups and loads the model. Without cache, scheduler and server this
takes a second per model.
"""

import gc
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module

from checkpoint_convert.hf_config import has_other_towers, read_scheme
from checkpoint_convert.vllm import EngineDims
from helpers.engines.live import KERNELS
from helpers.models.images import IMAGE_LIMITS
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engine_weights.protocol import (
    VISION_VARIABLE,
    WorkerSums,
    check_reports,
    pushable_parameters,
)
from megatron_grpo.engines.vllm.args import (
    CPU_ATTENTION,
    DRAFTER_VARIABLE,
    WORKER_EXTENSION,
    dequantizing_arguments,
    vllm_environment,
)

Parameters = dict[str, Tensor]
Read = Callable[[Module, Path, EngineDims], Any]
"""Called in a worker: (loaded model, its folder, dims of the engine)."""


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "mtp": {
        "speculative_config": {
            "attention_backend": CPU_ATTENTION,
            "method": "mtp",
            "num_speculative_tokens": 1,
        }
    },
    "vision": {"limit_mm_per_prompt": IMAGE_LIMITS},
}
"""Arguments of a worker that also holds a drafting layer or a vision tower, which pushes fill."""
VARIABLES = {"mtp": DRAFTER_VARIABLE, "vision": VISION_VARIABLE}
NUM_ENGINES = 2
"""Engines that take a push: the first feeds the second."""


def loaded_parameters(
    models: Sequence[tuple[Path, EngineDims]], dtype: str = "float32", also: str = ""
) -> list[list[Parameters]]:
    """Loaded parameters by model and worker. All dims have the same number of workers."""
    return read_in_workers(models, partial(_parameters, also == "vision"), dtype, also)


def _parameters(with_vision: bool, model: Module, folder: Path, dims: EngineDims) -> Parameters:
    found = pushable_parameters(model, with_vision)
    return {name: value.detach().clone() for name, value in found.items()}


def read_in_workers(
    models: Sequence[tuple[Path, EngineDims]],
    read: Read,
    dtype: str = "float32",
    also: str = "",
) -> list[list[Any]]:
    """Results of `read` by model and worker. All dims have the same number of workers."""
    (size,) = {dims.num_workers for _, dims in models}
    # One process builds all models: 121 s on a machine that is busy with other tests.
    by_rank = run_ranks(size, _load, models, read, dtype, also, timeout=250, with_vllm=True)
    return [list(workers) for workers in zip(*by_rank, strict=True)]


def _load(
    rank: int, models: Sequence[tuple[Path, EngineDims]], read: Read, dtype: str, also: str
) -> list[Any]:
    become_worker(models[0][1].num_workers)
    give_sparse_models_dense_kernels()
    give_experts_without_gates_kernels()
    let_vllm_search_llvmlite()
    loaded = []
    for folder, dims in models:
        worker = start_worker(rank, folder, dims, dtype, also)
        loaded.append(read(worker.get_model(), folder, dims))
    return loaded


def become_worker(num_workers: int) -> None:
    """Set the environment variables of a worker, which vLLM reads when it is imported."""
    rollout = RolloutConfig(tensor_parallel_size=num_workers, max_completion_length=1)
    os.environ.update(vllm_environment(ModelConfig(path=Path()), rollout, on_gpu=False))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.path.insert(0, KERNELS.partition(os.pathsep)[0])  # vLLM finds the plugin by its metadata


def give_sparse_models_dense_kernels() -> None:
    """Let vLLM build models with sparse attention on CPUs, where it has no kernels for it. The
    parameters are the same; nothing is computed."""
    from vllm.platforms.cpu import CpuPlatform

    own: Any = CpuPlatform.get_attn_backend_cls

    def dense(selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        return str(own(selected, attn_selector_config._replace(use_sparse=False), num_heads))

    CpuPlatform.get_attn_backend_cls = staticmethod(dense)  # type: ignore[method-assign, assignment]


def give_experts_without_gates_kernels() -> None:
    """Let vLLM build experts without gates on CPUs, with its router for Hopper GPUs."""
    from unittest.mock import Mock

    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.router import gate_linear
    from vllm.platforms import current_platform

    # Only these queries are answered as by a GPU; all others go to the CPU platform.
    config.current_platform = Mock(wraps=current_platform, is_cuda_alike=lambda: True)
    gate_linear.current_platform = Mock(
        wraps=current_platform, is_cuda=lambda: True, is_device_capability=lambda _: True
    )
    experts: Any = cpu_moe.CPUUnquantizedExperts
    experts._supports_no_act_and_mul = staticmethod(lambda: True)
    own = experts._supports_activation
    experts._supports_activation = staticmethod(lambda kind: not kind.is_gated or own(kind))


def let_vllm_search_llvmlite() -> None:
    """Let vLLM search all modules for kernels on CPUs once Kimi-K2.5's image processor has loaded
    llvmlite: its library object has every attribute, even `__dict__`."""
    from llvmlite.binding import ffi

    own = ffi._lib_wrapper.__getattr__

    def found(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return own(library, name)

    ffi._lib_wrapper.__getattr__ = found


def start_worker(
    rank: int, folder: Path, dims: EngineDims, dtype: str, also: str = "", **arguments: Any
) -> Any:
    """Worker `rank` of a vLLM engine that has loaded `folder`; `also` is a key of `OPTIONS`,
    `arguments` are further ones of the engine.

    Collective over the default group. An earlier worker of this process loses its groups but keeps
    its parameters. All workers must have the same sizes.
    """
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    arguments |= OPTIONS[also]
    if has_other_towers(folder) and also != "vision":
        arguments |= {"language_model_only": True}
    if read_scheme(folder) is not None and "load_format" not in arguments:
        arguments |= dequantizing_arguments({}, {})
    config = EngineArgs(
        model=str(folder),
        dtype=dtype,
        tensor_parallel_size=dims.tensor,
        data_parallel_size=dims.data,
        enable_expert_parallel=dims.expert_parallel,
        enforce_eager=True,
        block_size=32,
        attention_backend=CPU_ATTENTION,
        kv_cache_memory_bytes=2**20,
        distributed_executor_backend="mp",
        worker_extension_cls=WORKER_EXTENSION,
        **arguments,
    ).create_engine_config()
    config.parallel_config.data_parallel_rank, group_rank = divmod(rank, dims.tensor)
    worker = WorkerWrapperBase(group_rank)
    parts = {
        "vllm_config": config,
        "local_rank": group_rank,
        "rank": group_rank,
        # With different names, workers reduce over gloo and not over shared memory, which a killed
        # rank would leave behind.
        "distributed_init_method": f"file:///weights-{os.getpid()}",
        "is_driver_worker": True,
    }
    destroy_model_parallel()  # an MoE model requires a group that a dense model lacks
    worker.init_worker([parts] * dims.tensor)
    worker.init_device()
    if not gc.get_freeze_count():
        gc.freeze()  # loading runs the GC twice, each a third of a second over all of vLLM
    worker.load_model()
    for name in VARIABLES.values():
        os.environ.pop(name, None)
    if also:
        os.environ[VARIABLES[also]] = "1"
    assert worker.push_worker  # created at this access, with this environment
    return worker


# vLLM engines without servers: workers that take calls from other processes.


class WorkerProcess:
    """State of one worker's process, passed to each function called there."""

    worker: Any
    """The vLLM worker that `serve` chose last."""
    arguments: dict[str, Any]
    """Arguments of `worker` that its test chose."""
    before: dict[str, Tensor]
    """An earlier copy of the worker's parameters."""
    plain: Tensor
    """For benchmarks: a tensor of about as many bytes as the worker's parameters."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._served: dict[tuple[Path, EngineDims, str, str], Any] = {}

    def serve(self, folder: Path, dims: EngineDims, dtype: str, also: str = "") -> None:
        """Set `worker` to one that has loaded `folder`, started at the first call."""
        key = folder, dims, dtype, also
        if key not in self._served:
            self._served[key] = start_worker(self.rank, folder, dims, dtype, also)
        self.worker = self._served[key]


Function = Callable[..., Any]
"""Called in a worker's process: (its `WorkerProcess`, further arguments)."""


@dataclass(frozen=True)
class WorkerEngines:
    """A handle with which any process calls all workers at once."""

    addresses: list[list[str]]
    """Indexed by engine, then by worker."""

    @property
    def base_urls(self) -> list[str]:
        """Made-up URLs of the engines, which the config requires; nothing listens there."""
        return [f"http://127.0.0.1:{port}" for port in range(1, 1 + len(self.addresses))]

    def call(self, function: Function, *args: Any) -> list[list[Any]]:
        """Results of the module-level `function` in every worker of every engine."""
        return self.call_each(function, [args for _ in self.addresses])

    def call_each(self, function: Function, args: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        """Like `call`, with separate arguments for each engine."""
        with ExitStack() as stack:
            calls = [
                [stack.enter_context(Client(address, "AF_UNIX")) for address in workers]
                for workers in self.addresses
            ]
            for workers, own in zip(calls, args, strict=True):
                for connection in workers:
                    connection.send((function, own))
            return [[connection.recv() for connection in workers] for workers in calls]


@contextmanager
def worker_engines(
    num_engines: int, num_workers: int, folder: Path, timeout: float
) -> Iterator[WorkerEngines]:
    """Engines of `num_workers` each, for `timeout` seconds at most; their sockets are in `folder`.

    If a worker has failed, the end of the block raises its traceback.
    """
    addresses = [
        [str(folder / f"{engine}-{worker}") for worker in range(num_workers)]
        for engine in range(num_engines)
    ]
    with ThreadPoolExecutor(num_engines) as pool:
        worlds = [
            pool.submit(
                run_ranks, num_workers, _take_calls, workers, timeout=timeout, with_vllm=True
            )
            for workers in addresses
        ]
        engines = WorkerEngines(addresses)
        try:
            while not all(Path(address).exists() for address in chain(*addresses)):
                assert not any(world.done() for world in worlds)
                time.sleep(0.05)
            yield engines
        finally:
            for address in chain(*addresses):
                with suppress(OSError), Client(address, "AF_UNIX") as connection:
                    connection.send((_end, ()))
            for world in worlds:
                world.result()


def _take_calls(rank: int, addresses: Sequence[str]) -> None:
    with Listener(addresses[rank], "AF_UNIX") as listener:
        become_worker(len(addresses))
        give_sparse_models_dense_kernels()
        give_experts_without_gates_kernels()
        process = WorkerProcess(rank)
        function = None
        while function is not _end:
            with listener.accept() as connection:
                try:
                    function, args = connection.recv()
                except EOFError:  # the caller failed before its call
                    continue
                answer = function(process, *args)
                with suppress(BrokenPipeError):  # the caller failed during its call
                    connection.send(answer)


def _end(process: WorkerProcess) -> None:
    pass


def parameters_of(worker: Any) -> dict[str, Tensor]:
    drafter = worker.get_draft_model()
    drafts = {} if drafter is None else dict(drafter.named_parameters(prefix="drafter"))
    return dict(worker.get_model().named_parameters()) | drafts


class WorkerClient:
    """The methods of `RolloutClient` that pushes use, without HTTP and without pauses."""

    pool = SimpleNamespace(starting=False, up=True)

    def __init__(self, workers: WorkerEngines) -> None:
        self.workers = workers
        self.base_urls = workers.base_urls

    def update_health(self, check: Any) -> None:
        """See `RolloutClient`; the engines here never change."""

    def await_engines(self, check: Any) -> tuple[int, int]:
        return len(self.workers.addresses), 1

    def sleep(self) -> None:
        """See `RolloutClient`; the engines here keep their memory."""

    def open_channels(self, transfer: dict[str, Any], is_sending: Any) -> None:
        info = {"transfer": transfer, "channels": "channels", "question": ""}
        engines = range(len(self.workers.addresses))
        calls = [("open_channels", {**info, "engine": engine}) for engine in engines]
        self.workers.call_each(_ask, calls)

    def begin_push(self, push: str) -> None:
        self._ask("begin_push", push=push, channels="channels")

    def receive_push(self, push: str, is_sending: Any) -> None:
        self._ask("receive_push", push=push)

    def check_push(self, push: str, expected: Sequence[WorkerSums] | None) -> None:
        check_reports(self.base_urls, self._ask("push_report"), push, expected)

    def finish_push(self, push: str, policy_version: int) -> None:
        self._ask("finish_push", push=push)
        assert {a["push"] for workers in self._ask("held_push") for a in workers} == {push}

    def _ask(self, method: str, **arguments: str) -> list[list[dict[str, Any]]]:
        question = uuid.uuid4().hex
        answers = self.workers.call(_ask, method, arguments | {"question": question})
        assert all(a["question"] == question for workers in answers for a in workers)
        return answers


def _ask(process: WorkerProcess, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = process.worker.answer_push(call=call, **arguments)
    return answer
