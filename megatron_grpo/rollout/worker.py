"""What runs inside the processes of a vLLM engine that the trainer started.

vLLM calls `register` (entry point `vllm.general_plugins`) in the API server, in the engine core and
in every worker, before a model is built. In a vLLM that somebody else started it does nothing.
"""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm._custom_ops
import vllm.model_executor.layers.utils
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from megatron_grpo.parent_death import die_with_parent
from megatron_grpo.rollout.vllm_command import ENGINE_VARIABLE
from megatron_grpo.rollout.weight_folder import BACKEND, check_all_loaded, folder_tensors


def register() -> None:
    """Make this process end with its parent, and its model accept new weights."""
    if ENGINE_VARIABLE not in os.environ:
        return
    parent = multiprocessing.parent_process()
    if parent is not None:  # the API server is tied to its own parent by whoever started it
        die_with_parent()
        if not parent.is_alive():
            sys.exit("the process that started this one has ended")
    WeightTransferEngineFactory.register_engine(BACKEND, FolderWeightTransfer)
    if current_platform.is_cpu():
        keep_weights_unpacked()


def keep_weights_unpacked() -> None:
    """Have vLLM's CPU layers compute with `layer.weight` itself, as its CUDA layers do.

    It would pack linear weights for oneDNN or SGL kernels after loading and leave an empty
    parameter behind; what is loaded later would not reach the packs, a tied lm_head's least of all.
    """
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def unlink_group_memory() -> None:
    """Take its name from the shared memory over which tensor-parallel CPU workers reduce.

    All have mapped it when the model is loaded. Without a name it goes with its last process, even
    when that is killed.
    """
    for file in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*"):
        file.unlink(missing_ok=True)


@dataclass
class NoInit(WeightTransferInitInfo):
    """A folder needs no connection."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """Where the new weights lie."""

    folder: str


class FolderWeightTransfer(WeightTransferEngine[NoInit, FolderUpdate]):
    """Each worker reads a Hugging Face folder by the model's own loader, which takes its share.

    vLLM's layerwise reload is for layouts that change after loading; ours do not (see above).
    """

    init_info_cls = NoInit
    update_info_cls = FolderUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if current_platform.is_cpu():
            unlink_group_memory()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Load every parameter; raises ValueError naming those that the folder lacks."""
        folder = Path(update_info.folder)
        model: Any = self.model
        loaded = model.load_weights(folder_tensors(folder))
        check_all_loaded({name for name, _ in model.named_parameters()}, loaded, folder)

    def finish_weight_update(self) -> None:
        """The weights are in place already."""

    def shutdown(self) -> None:
        """Nothing to release."""
