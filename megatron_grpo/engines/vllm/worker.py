"""Our code inside the processes of a vLLM engine.

vLLM calls `register` (entry point `vllm.general_plugins`) in the API server, the engine core and
every worker, before the model is built. In a vLLM that this project did not start it does nothing.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import get_dp_group, get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.output_processor import RequestState

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.quantization import CONFIG_KEYS, ENGINE_SCHEMES, ignored_modules
from checkpoint_convert.quantized_shard import quantized_tensors
from checkpoint_convert.text_tower import text_name
from checkpoint_convert.weights import whole_tensors
from megatron_grpo.engines.push_protocol import (
    Json,
    PushState,
    drafter_parameters,
    own_parameters,
    parameter_table,
)
from megatron_grpo.engines.vllm.args import (
    ADAPTER_ID,
    BACKEND,
    DEQUANTIZED,
    DRAFTING_BACKEND,
    ENGINE_VARIABLE,
    QUANTIZED,
    VISION_BACKEND,
)
from megatron_grpo.engines.vllm.cpu_layers import compute_by_torch
from megatron_grpo.engines.vllm.cpu_processes import examine_models_here, fork_cores
from megatron_grpo.engines.vllm.kept_caches import keep_caches
from megatron_grpo.engines.weight_receivers import Receiver, open_receiver
from megatron_grpo.launch.parent_death import die_with_parent
from parallel.checksum import checksums


def register() -> None:
    """Tie this process to its parent, and register our weight-transfer backend and our loader."""
    if ENGINE_VARIABLE not in os.environ:
        return
    parent = multiprocessing.parent_process()
    if parent is not None:  # None in the API server, which is tied to whoever started it
        # vLLM 0.33 starts workers on GPUs from threads that end at once, before a worker gets here:
        # then it is the core's main thread that counts.
        die_with_parent()
        if not parent.is_alive():
            sys.exit("the process that started this one has ended")
    answer_for_all_groups()
    keep_caches()
    tell_versions_of_chunks()
    for backend in (BACKEND, DRAFTING_BACKEND, VISION_BACKEND):
        WeightTransferEngineFactory.register_engine(backend, ShardTransfer)
    register_model_loader(DEQUANTIZED)(DequantizingLoader)
    for scheme in ENGINE_SCHEMES:
        register_model_loader(QUANTIZED + scheme)(QuantizingLoader)
    if current_platform.is_cpu():
        compute_by_torch()
        examine_models_here()
        fork_cores()


class DequantizingLoader(DefaultModelLoader):
    """Loads a quantised folder into a model that is not: what the trainer reads there, too."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the folder, dequantised."""
        # vLLM's gpt-oss reads a method from this key if it is there, though its value is null.
        vars(model_config.hf_config).pop(CONFIG_KEYS[0], None)
        self.counter_before_loading_weights = time.perf_counter()
        return whole_tensors(Path(model_config.model))


class QuantizingLoader(DefaultModelLoader):
    """Loads a folder into a model that is quantised: what the trainer would push of it."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the folder, quantised, and its scales."""
        self.counter_before_loading_weights = time.perf_counter()
        scheme = str(self.load_config.load_format).removeprefix(QUANTIZED)
        ignored = ignored_modules(getattr(model_config.hf_config, CONFIG_KEYS[0]))
        return quantized_tensors(Path(model_config.model), scheme, ignored)


def number_of_worker() -> int:
    """The number of this process's worker among all of its engine."""
    tensor = get_tp_group()
    return get_dp_group().rank_in_group * tensor.world_size + tensor.rank_in_group


def answer_for_all_groups() -> None:
    """Let calls to the workers of all data-parallel groups have the answers of all.

    vLLM makes such a call in each group's process, and returns the answers of the first.
    """

    async def collective_rpc(
        self: DPLBAsyncMPClient,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = "collective_rpc", method, timeout, args, kwargs
        return list(chain.from_iterable(await self.call_utility_all_async(*call)))

    async def reset_prefix_cache(self: DPLBAsyncMPClient, *args: bool) -> bool:
        return all(await self.call_utility_all_async("reset_prefix_cache", *args))

    DPLBAsyncMPClient.collective_rpc_async = collective_rpc
    DPLBAsyncMPClient.reset_prefix_cache_async = reset_prefix_cache


def tell_versions_of_chunks() -> None:
    """Let each chunk of a streamed completion tell which weights have sampled the tokens so far.

    vLLM tells it in the last one, which an engine that dies does not send.
    """
    new_output = RequestState._new_completion_output

    def with_versions(self: RequestState, *args: Any) -> CompletionOutput:
        output = new_output(self, *args)
        output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions


def unlink_group_memory() -> None:
    """Unlink the shared memory that tensor-parallel CPU workers use for reductions.

    All workers have mapped it by the time the model is loaded. Unlinked, it is freed with its last
    process, even if that is killed.
    """
    for file in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*"):
        file.unlink(missing_ok=True)


def absorb_latents(model: torch.nn.Module | None, dtype: torch.dtype) -> None:
    """Let vLLM make anew, in place, what decode steps need of weights that project latents up.

    Of a quantised weight these are copies in `dtype`, that of the model.
    """
    for module in model.modules() if model is not None else ():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)


def adapter_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """A and B of the only adapter, by the name of their module, kind and place in it.

    Empty in an engine without adapters. vLLM multiplies each module's tokens by these buffers.
    """
    return {
        f"{text_name(name)}.lora_{x}.{number}": stacked[0, 0]
        for name, module in model.named_modules()
        if isinstance(module, BaseLayerWithLoRA)
        for x, buffers in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked))
        for number, stacked in enumerate(buffers)
    }


def register_adapter(model: torch.nn.Module) -> None:
    """Let requests use the buffers as they are, under `ADAPTER_ID`.

    After a push vLLM forgets its adapters, as if their buffers were those of other weights. For a
    number that it does not know it would read a file, and write that to the buffers.
    """
    manager: Any = getattr(model, "lora_manager", None)
    if manager is not None:
        manager._registered_adapters[ADAPTER_ID] = LoRAModel(ADAPTER_ID, 1, {})
        manager._active_adapters[ADAPTER_ID] = None
        manager.lora_index_to_id[0] = ADAPTER_ID


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the workers of one engine need to open their channels."""

    transfer: Json
    """For `open_receiver`."""
    engine: int
    channels: str


@dataclass
class PushInfo(WeightTransferUpdateInfo):
    """Which push is under way."""

    push: str


class ShardTransfer(WeightTransferEngine[InitInfo, PushInfo]):
    """Each worker receives its shard over its own channels, directly into its parameters.

    vLLM's layerwise reload is for layouts that change after loading; ours do not (see above, and
    `moe_backend` in vllm/args.py).

    Each worker records which push its weights belong to. The version that vLLM puts on samples is
    not enough: another process holds it, and it changes at another time.

    A failure is kept in the state for the client to read. If it were raised here, vLLM would pass
    on the first worker's exception and leave the other workers' answers unread; the next calls
    would take these for their own, so that an engine with several workers would be unusable.
    """

    init_info_cls = InitInfo
    update_info_cls = PushInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state = PushState()
        self.drafter: torch.nn.Module | None = None
        """What drafts, if pushes fill it, too; `PushWorker.describe_parameters` sets it."""
        self._receiver: Receiver | None = None
        if current_platform.is_cpu():
            unlink_group_memory()

    def parameters(self) -> dict[str, Tensor]:
        """The weights that pushes bring, by name; with adapters, those that they do not."""
        parameters = own_parameters(self.model, self.config.backend == VISION_BACKEND)
        if self.drafter is not None:
            family = FAMILIES[self.model_config.hf_text_config.model_type]
            is_apart = family.has_mtp_apart
            parameters |= drafter_parameters(self.drafter, self.model, is_apart=is_apart)
        return parameters

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open channels to all ranks that send to this worker, replacing earlier ones."""
        self.state.use_channels(init_info.channels)
        with self.state.keep_error():
            self.shutdown()
            self._receiver = open_receiver(
                init_info.transfer,
                init_info.engine,
                number_of_worker(),
                adapter_buffers(self.model) or self.parameters(),
                self.device,
            )

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: PushInfo) -> None:
        """Receive every parameter of the push that last began."""
        if self._receiver is None:
            return  # the state says why
        with self.state.keep_error():
            weights, adapters = self.parameters(), adapter_buffers(self.model)
            sums = self._receiver.receive_weights(adapters or weights)
            for model in (self.model, self.drafter):
                absorb_latents(model, self.model_config.dtype)
            self.state.mark_loaded(sums | checksums(weights) if adapters else sums)

    def finish_weight_update(self) -> None:
        """The weights are in place already."""

    def shutdown(self) -> None:
        """Close the channels."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


class PushWorker:
    """The methods that the client calls in every worker, over /collective_rpc.

    vLLM adds it to the base classes of its worker. Weight updates use these methods and not vLLM's
    own routes, which raise when a step does not follow the one before; when two trainers collide,
    that would happen in all workers at once.

    Answers are plain data. Each repeats `question`, which the client makes up anew for every call,
    so that it recognizes an answer to a different call.
    """

    weight_transfer_engine: ShardTransfer
    _weight_update_active: bool

    def describe_parameters(self, question: str) -> Json:
        """Shape and dtype of every parameter that a push fills or verifies, by name."""
        transfer, worker = self.weight_transfer_engine, cast(Any, self)
        if transfer.config.backend == DRAFTING_BACKEND:
            transfer.drafter = worker.get_draft_model()
        parameters = transfer.parameters() | adapter_buffers(transfer.model)
        return {"question": question, "parameters": parameter_table(parameters)}

    def begin_push(self, question: str, push: str, channels: str) -> Json:
        """Declare that the weights have no version until `push` is complete.

        The trainer that connected last owns the engine; `push_report` tells the others.
        """
        worker: Any = self
        if not self._weight_update_active:  # already active if a trainer ended during a push
            worker.start_weight_update()
        self.weight_transfer_engine.state.begin_push(push, channels)
        return {"question": question}

    def receive_push(self, question: str, push: str) -> Json:
        """Receive the weights of `push`, unless another push has begun since."""
        if self._is_open(push):
            worker: Any = self
            worker.update_weights({"push": push})
        return {"question": question}

    def push_report(self, question: str) -> Json:
        """Which push is current, whether its weights are loaded, their checksums, and any error."""
        return {"question": question, **self.weight_transfer_engine.state.push_report()}

    def finish_push(self, question: str, push: str) -> Json:
        """From now on the weights count as those of `push`, if it is loaded."""
        if self._is_open(push):
            worker: Any = self
            worker.finish_weight_update()
            register_adapter(self.weight_transfer_engine.model)
            self.weight_transfer_engine.state.finish_push()
        return {"question": question}

    def drop_weights(self, question: str) -> Json:
        """From now on there are no weights, until a push is complete.

        Answers whether the engine was started so that it can give their memory back.
        """
        self.weight_transfer_engine.state.drop_weights()
        worker: Any = self
        can_sleep = current_platform.is_cpu() or worker.model_config.enable_sleep_mode
        return {"question": question, "can_sleep": can_sleep}

    def hold_loaded(self, question: str) -> Json:
        """From now on the weights count as those the engine loaded itself, if there was no push."""
        self.weight_transfer_engine.state.hold_loaded()
        return {"question": question}

    def held_push(self, question: str) -> Json:
        """The push whose weights the worker holds; empty while they are incomplete."""
        return {"question": question, "push": self.weight_transfer_engine.state.held}

    def _is_open(self, push: str) -> bool:
        return self._weight_update_active and self.weight_transfer_engine.state.push == push
