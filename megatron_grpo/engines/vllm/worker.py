"""Our code inside the processes of a vLLM engine.

vLLM calls `register` (entry point `vllm.general_plugins`) in API server, engine core and workers,
before the model is built. In a vLLM that this project did not start it does nothing.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed.parallel_state import get_dp_group, get_tp_group
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.quantized.scheme import CONFIG_KEYS, ENGINE_SCHEMES, ignored_modules
from checkpoint_convert.quantized.shard import quantized_tensors
from checkpoint_convert.text_tower import text_name
from checkpoint_convert.weights import whole_tensors
from megatron_grpo.engine_weights.protocol import (
    VISION_VARIABLE,
    Json,
    drafter_parameters,
    parameter_table,
    pushable_parameters,
)
from megatron_grpo.engine_weights.worker import PushWorker, Receiver
from megatron_grpo.engines.patches import apply
from megatron_grpo.engines.vllm.args import (
    ADAPTER_ID,
    DEQUANTIZED,
    DRAFTER_VARIABLE,
    ENGINE_VARIABLE,
    QUANTIZED,
)
from megatron_grpo.engines.vllm.patches import CPU_PATCHES, PATCHES, set_up_cpu
from megatron_grpo.launch.parent_death import die_with_parent
from parallel.checksum import checksums


def register() -> None:
    """Tie this process to its parent, register our loaders, and apply our patches."""
    if ENGINE_VARIABLE not in os.environ:
        return
    parent = multiprocessing.parent_process()
    if parent is not None:  # None in the API server, which `parent_death` has tied
        # Linux signals at the end of the parent's *thread*: vLLM 0.33 starts workers on GPUs from
        # threads that end before a worker gets here, and then the core's main thread counts.
        die_with_parent()
        if not parent.is_alive():
            sys.exit("the process that started this one has ended")
    apply(PATCHES)
    register_model_loader(DEQUANTIZED)(DequantizingLoader)
    for scheme in ENGINE_SCHEMES:
        register_model_loader(QUANTIZED + scheme)(QuantizingLoader)
    if current_platform.is_cpu():
        apply(CPU_PATCHES)
        set_up_cpu()


class DequantizingLoader(DefaultModelLoader):
    """Loads a quantised folder into an unquantised model, with the values in the trainer."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the folder, dequantised."""
        # vLLM's gpt-oss reads a method from this key even if its value is null.
        vars(model_config.hf_config).pop(CONFIG_KEYS[0], None)
        self.counter_before_loading_weights = time.perf_counter()
        return whole_tensors(Path(model_config.model), of_mtp=is_own_layer(model_config))


class QuantizingLoader(DefaultModelLoader):
    """Loads a folder into a quantised model, with the values that the trainer would push."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the folder, quantised, and its scales."""
        self.counter_before_loading_weights = time.perf_counter()
        scheme = str(self.load_config.load_format).removeprefix(QUANTIZED)
        # vLLM gives `hf_overrides` to the model alone, not to its drafter.
        config = get_current_vllm_config().model_config.hf_config
        ignored = ignored_modules(getattr(config, CONFIG_KEYS[0]))
        folder, of_mtp = Path(model_config.model), is_own_layer(model_config)
        return quantized_tensors(folder, scheme, ignored, of_mtp=of_mtp)


def is_own_layer(config: ModelConfig) -> bool:
    """Whether this is a drafter in the folder of the engine's model: its layer for multi-token
    prediction."""
    folder = get_current_vllm_config().model_config.model
    return config.runner_type == "draft" and config.model == folder


def absorb_latents(model: torch.nn.Module | None, dtype: torch.dtype) -> None:
    """Let vLLM recompute, in place, the decode steps' copies of the weights that project latents
    up; these are in `dtype` where the weights are quantised."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)


def adapter_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Buffers A and B of the only adapter, such as `...qkv_proj.lora_A.0`, numbered within fused
    modules; empty in an engine without adapters."""
    return {
        f"{text_name(name)}.lora_{x}.{number}": stacked[0, 0]
        for name, module in model.named_modules()
        if isinstance(module, BaseLayerWithLoRA)
        for x, buffers in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked))
        for number, stacked in enumerate(buffers)
    }


def register_adapter(model: torch.nn.Module) -> None:
    """Register the buffers as adapter `ADAPTER_ID`: vLLM would read a file for an unknown id."""
    manager: Any = getattr(model, "lora_manager", None)
    if manager is not None:
        manager._registered_adapters[ADAPTER_ID] = LoRAModel(ADAPTER_ID, 1, {})
        manager._active_adapters[ADAPTER_ID] = None
        manager.lora_index_to_id[0] = ADAPTER_ID


class VllmWorker(PushWorker):
    """The weights of a worker of vLLM."""

    def __init__(self, worker: Any) -> None:
        tensor, data = get_tp_group(), get_dp_group()
        number = data.rank_in_group * tensor.world_size + tensor.rank_in_group
        super().__init__(number, worker.device)
        self.model, self._config = worker.get_model(), worker.model_config
        self._drafter = worker.get_draft_model() if DRAFTER_VARIABLE in os.environ else None
        self._with_vision = VISION_VARIABLE in os.environ

    def weights(self) -> dict[str, Tensor]:
        """The model's weights by name: of pushes, or as loaded if pushes bring an adapter."""
        weights = pushable_parameters(self.model, self._with_vision)
        if self._drafter is not None:
            is_apart = FAMILIES[self._config.hf_text_config.model_type].mtp.is_apart
            weights |= drafter_parameters(self._drafter, self.model, is_apart=is_apart)
        return weights

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's tensors, if the engine has one, or else the weights."""
        return adapter_buffers(self.model) or self.weights()

    def receive(self, receiver: Receiver, received: dict[str, Tensor]) -> Mapping[str, int]:
        """Receive a push, and recompute what vLLM derives from weights (`absorb_latents`). With
        adapters, the checksums of the weights are included."""
        # Without vLLM's layerwise reload, which is for layouts that change after loading: ours do
        # not (see `moe_backend` in args.py).
        sums = {**super().receive(receiver, self.tensors())}
        for model in (self.model, self._drafter):
            absorb_latents(model, self._config.dtype)
        if adapter_buffers(self.model):
            sums |= checksums(self.weights())
            register_adapter(self.model)
        torch.accelerator.synchronize()  # copies may still be under way
        return sums

    def describe_parameters(self) -> Json:
        parameters = self.weights() | adapter_buffers(self.model)
        return {"parameters": parameter_table(parameters)}

    def can_sleep(self) -> bool:
        """Whether vLLM's sleep mode is on; a CPU has no memory to give away."""
        return current_platform.is_cpu() or bool(self._config.enable_sleep_mode)


class WorkerExtension:
    """Mixin for vLLM's worker class; /collective_rpc calls its methods."""

    push_worker = cached_property(VllmWorker)

    def answer_push(self, **call: Any) -> Json:
        """See `PushWorker.answer`."""
        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            answer: Json = self.push_worker.answer(**call)
        return answer
