"""What runs inside the processes of a vLLM engine that the trainer started.

vLLM calls `register` (entry point `vllm.general_plugins`) in the API server, in the engine core and
in every worker, before a model is built. In a vLLM that somebody else started it does nothing.
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.platforms import current_platform

from megatron_grpo.parent_death import die_with_parent
from megatron_grpo.rollout.vllm_command import ENGINE_VARIABLE
from megatron_grpo.rollout.weight_folder import BACKEND, check_all_loaded, folder_tensors
from parallel.checksum import whole_checksum

Json = dict[str, Any]


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
    The weights of experts it would pack in place, and take what is loaded later for packed.
    """
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    cpu_moe.cpu_fused_moe = experts_on_unpacked_weights


def experts_on_unpacked_weights(
    output: Tensor,
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    expert_weights: Tensor,
    expert_ids: Tensor,
    activation: str,
    isa: str,
    are_inputs_weighted: bool,
) -> None:
    """What vLLM's kernel of packed weights computes, into `output` [T, hidden size].

    `gate_up` [experts, 2 * size, hidden size], `down` [experts, hidden size, size];
    `expert_weights` and `expert_ids` [T, experts per token].
    """
    assert activation == "silu" and gate_up_bias is None and not are_inputs_weighted
    output.zero_()
    for expert in expert_ids.unique().tolist():
        token, slot = (expert_ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[token] @ gate_up[expert].T).chunk(2, dim=-1)
        values = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        weights = expert_weights[token, slot].unsqueeze(-1)
        output.index_add_(0, token, (values * weights).to(output.dtype))


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
    """Where the new weights lie, and which push they are of."""

    folder: str
    push: str


class FolderWeightTransfer(WeightTransferEngine[NoInit, FolderUpdate]):
    """Each worker reads a Hugging Face folder by the model's own loader, which takes its share.

    vLLM's layerwise reload is for layouts that change after loading; ours do not (see above, and
    `moe_backend` in vllm_command.py).

    Which push the weights are of is kept here, beside them: the version that vLLM puts on samples
    is kept by another process, and changes at another moment.
    """

    init_info_cls = NoInit
    update_info_cls = FolderUpdate

    push = ""
    """The push that began last."""
    is_loaded = False
    """Whether that push has written every parameter."""
    error = ""
    """Why it has not."""
    held_push = ""
    """The push whose weights these are; empty until one is complete and whenever one is open."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if current_platform.is_cpu():
            unlink_group_memory()

    def begin_push(self, push: str) -> None:
        """From here on these are nobody's weights; an earlier push that is open is over."""
        self.push, self.is_loaded, self.error, self.held_push = push, False, "", ""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Load every parameter.

        A failure is kept for `PushWorker.push_report`. Raised here, vLLM would pass on the first
        worker's and leave the answers of the others unread, where the next calls find them and take
        them for theirs: with several workers an engine is of no use after that.
        """
        if update_info.push != self.push:
            return  # another push has begun since, as this one's report will say
        folder = Path(update_info.folder)
        model: Any = self.model
        try:
            loaded = model.load_weights(folder_tensors(folder))
            check_all_loaded({name for name, _ in model.named_parameters()}, loaded, folder)
        except Exception as error:
            traceback.print_exc()
            self.error = str(error) or repr(error)
        else:
            self.is_loaded = True

    def finish_weight_update(self) -> None:
        """The weights are in place already; from here on they are those of the push."""
        if self.is_loaded:
            self.held_push = self.push

    def shutdown(self) -> None:
        """Nothing to release."""


class PushWorker:
    """What the client asks of every worker, over /collective_rpc; vLLM makes it a base of its own.

    Answers are plain data. Each repeats `question`, a word of the client's that is new in every
    call, by which it knows the answer to another.
    """

    weight_transfer_engine: FolderWeightTransfer
    _weight_update_active: bool

    def describe_parameters(self, question: str) -> Json:
        """Shape and dtype of every parameter, by name."""
        parameters = {
            name: (list(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for name, parameter in self._parameters()
        }
        return {"question": question, "parameters": parameters}

    def begin_push(self, question: str, push: str) -> Json:
        """Declare the weights to be of no version until `push` is complete.

        The last push to begin has the engine: whoever began earlier is told by `push_report`.
        """
        if self._weight_update_active:  # of a trainer that ended, or failed, in mid-push
            worker: Any = self
            worker.finish_weight_update()
        self.weight_transfer_engine.begin_push(push)
        return {"question": question}

    def push_report(self, question: str) -> Json:
        """Which push has the engine, whether its weights are loaded, and their checksums."""
        transfer = self.weight_transfer_engine
        sums = {name: whole_checksum(parameter) for name, parameter in self._parameters()}
        return {
            "question": question,
            "push": transfer.push,
            "is_loaded": transfer.is_loaded,
            "error": transfer.error,
            "sums": dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)),
        }

    def held_push(self, question: str) -> Json:
        """The push whose weights the worker holds; empty while it holds no complete ones."""
        return {"question": question, "push": self.weight_transfer_engine.held_push}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        model: Any = self.weight_transfer_engine.model
        yield from model.named_parameters()
