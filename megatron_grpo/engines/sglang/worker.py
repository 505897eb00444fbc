"""Our code inside the process of an SGLang worker, which SGLang calls a scheduler.

Its route /weights_checker passes a request on to all workers and takes an answer of each: the one
way into them that brings data back. So the client's calls travel as actions of that route.
"""

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.managers import schedule_batch, scheduler
from sglang.srt.managers.io_struct import CheckWeightsReqInput, CheckWeightsReqOutput
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, alloc_with_host_register
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error,
)
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_exec
from sglang.srt.server_args import ServerArgs
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils import is_cpu
from sglang.srt.utils.weight_versions import compute_weight_version_spans
from torch import Tensor
from torch.nn import Module

from checkpoint_convert import read_shape
from checkpoint_convert.megatron import file_layout
from checkpoint_convert.quantization import CONFIG_KEYS, ignored_modules
from checkpoint_convert.quantized_shard import quantized_tensors
from checkpoint_convert.weights import whole_tensors
from megatron_grpo.engines.push_protocol import VISION_VARIABLE, Json, own_parameters
from megatron_grpo.engines.push_worker import PushWorker
from megatron_grpo.engines.sglang.images import forget_features, see_bytes
from megatron_grpo.engines.sglang.model_folder import WEIGHTS_VARIABLE
from megatron_grpo.engines.sglang.variables import QUANTIZATION_VARIABLE, RENDEZVOUS_VARIABLE
from megatron_grpo.engines.weight_receivers import Receiver
from parallel import Layout, ShardMapping
from parallel.checksum import checksums
from parallel.views import as_whole

Weights = Iterator[tuple[str, Tensor]]
FAILED = "failed"
"""The key of an answer that is an error."""
CALL = "megatron_grpo "
"""How the action of a request starts that is a call of ours; its arguments follow."""
OF_CACHE = (".k_scale", ".v_scale")
"""How the names of scales for keys and values end."""


def call_of(arguments: Json) -> str:
    """The action that has the `PushWorker` of every worker answer a call."""
    return CALL + json.dumps(arguments)


class SchedulerWorker(PushWorker):
    """The weights of a worker of SGLang.

    ValueError if SGLang keeps values made of them at its start that updates do not reach.
    """

    def __init__(self, manager: SchedulerWeightUpdaterManager) -> None:
        self.runner = manager.tp_worker.model_runner
        if error := _unsupported_derived_weight_cache_error(self.runner.model):
            raise ValueError(error)
        group = manager.tp_cpu_group
        super().__init__(dist.get_rank(group), next(self.runner.model.parameters()).device)
        unlink_queues()

    def tensors(self) -> dict[str, Tensor]:
        """The parameters of its part of the model.

        Quantised ones have scales for keys and values besides, which are ones: these are cached as
        they are.
        """
        held = own_parameters(self.runner.model, VISION_VARIABLE in os.environ)
        return {name: each for name, each in held.items() if not name.endswith(OF_CACHE)}

    def receive(self, receiver: Receiver, received: dict[str, Tensor]) -> Mapping[str, int]:
        """Between what SGLang does before and after weights change: layers that rearrange theirs
        do so anew. Sums of 8-bit weights are taken after it: it must leave these as they came."""
        self.runner.weight_updater.begin_weight_update()
        sums = super().receive(receiver, received)
        self.runner.weight_updater.end_weight_update(run_post_load=True)
        refresh_norms(self.runner.model)
        if VISION_VARIABLE in os.environ:
            forget_features()
        held = self.tensors()
        return checksums(held) if any(each.itemsize == 1 for each in held.values()) else sums

    def _drop_weights(self) -> Json:
        self.state.drop_weights()
        return {"can_sleep": is_cpu() or get_exec().features.enable_memory_saver}


def refresh_norms(model: Module) -> None:
    """Let norms that multiply by 1 + their weights keep the new sums, which some kernels read.

    SGLang does so only where it loads these weights itself.
    """
    for module in model.modules():
        if isinstance(module, GemmaRMSNorm):
            module.refresh_gemma_weight()


def load_from(folder: Path) -> None:
    """From now on, load the weights of text of that folder, dequantised."""

    def tensors(self: DefaultModelLoader, model_config: ModelConfig, model: Module) -> Weights:
        shape = read_shape(folder)
        is_transposed = shape.moe is not None and shape.moe.stacks == "transposed"
        return tensors_apart(folder, file_layout(shape)) if is_transposed else whole_tensors(folder)

    DefaultModelLoader._get_all_weights = tensors


def tensors_apart(folder: Path, layout: Layout) -> Weights:
    """Name and values of every tensor of a folder with that layout, each expert of a stack by
    itself.

    So SGLang's class of text reads those of Qwen3-VL, which publishes stacks of transposes. Every
    worker reads whole stacks, two at a time, into host memory (of Qwen3-VL-235B 3.2 and 1.6 GB).
    """
    pieces: dict[str, list[ShardMapping]] = {}
    for piece in layout.pieces:
        pieces.setdefault(piece.local, []).append(piece)
    for name, values in whole_tensors(folder):
        stack = values.view(layout.shapes[name])
        for piece in pieces[name]:
            yield piece.tensor, as_whole(stack[piece.local_box.slices], piece.axes)


def quantize_loaded(scheme: str) -> None:
    """From now on, quantise the weights of a folder that is loaded as pushes are."""
    load_model = DefaultModelLoader.load_model

    def tensors(self: DefaultModelLoader, model_config: ModelConfig, model: Module) -> Weights:
        folder = os.environ.get(WEIGHTS_VARIABLE, model_config.model_path)
        ignored = ignored_modules(getattr(model_config.hf_config, CONFIG_KEYS[0]))
        return quantized_tensors(Path(folder), scheme, ignored)

    def loaded(self: DefaultModelLoader, **arguments: Any) -> Module:
        model: Module = load_model(self, **arguments)
        check_scales(model)
        return model

    DefaultModelLoader._get_all_weights = tensors
    DefaultModelLoader.load_model = loaded


def check_scales(model: Module) -> None:
    """Raise ValueError if SGLang left out scales of linear layers; it fills these with `unset`."""
    unset = torch.finfo(torch.float32).min
    scales = {name: p for name, p in model.named_parameters() if name.endswith("weight_scale_inv")}
    if missing := [name for name, scale in scales.items() if (scale == unset).any()]:
        raise ValueError(f"SGLang has loaded no scales into {missing[0]}: use rollout.engine=vllm")


def unlink_queues() -> None:
    """Unlink the shared memory by which this process sends to other workers.

    All have mapped it by the time the model is loaded. Unlinked, it is freed with its last process;
    SGLang leaves it behind.
    """
    for file in Path("/dev/shm").glob(f"sgl_shm_mq_{os.getpid()}_*"):
        file.unlink(missing_ok=True)
        resource_tracker.unregister(f"/{file.name}", "shared_memory")


def launch(arguments: ServerArgs, folder: str) -> None:
    """Run an engine with our workers until it ends, or those of a further node of one.

    Of such a node SGLang's own function would see no end but that of the first worker, ignore
    SIGTERM, and open a port. `folder` is for a file in which the workers of one host meet.
    """
    if arguments.nnodes == 1:
        os.environ[RENDEZVOUS_VARIABLE] = f"file://{folder}/workers"
    if arguments.node_rank == 0:
        http_server.launch_server(arguments, run_scheduler_process_func=run_scheduler_process)
        return
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    Engine._launch_subprocesses(arguments, None, run_scheduler_process, None)
    connection.wait([worker.sentinel for worker in multiprocessing.active_children()])
    sys.exit("a worker of this node has ended")


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of that name, in which workers answer our calls."""
    check_weights = SchedulerWeightUpdaterManager.check_weights
    workers: list[SchedulerWorker] = []  # the one of this process, from the first call on

    def answer(
        self: SchedulerWeightUpdaterManager, request: CheckWeightsReqInput
    ) -> CheckWeightsReqOutput:
        if not request.action.startswith(CALL):
            return check_weights(self, request)
        call = json.loads(request.action.removeprefix(CALL))
        try:
            if not workers:
                workers.append(SchedulerWorker(self))
            own = workers[0].answer(**call)
        except Exception as error:  # the others wait for this worker's answer
            traceback.print_exc()
            own = {FAILED: repr(error)}
        answers: list[Any] = [None] * dist.get_world_size(self.tp_cpu_group)
        dist.all_gather_object(answers, own, group=self.tp_cpu_group)
        succeeded = not any(FAILED in each for each in answers)
        # SGLang joins what the first worker of each group says.
        told = json.dumps(answers) if dist.get_rank(self.tp_cpu_group) == 0 else ""
        return CheckWeightsReqOutput(success=succeeded, message=told)

    SchedulerWeightUpdaterManager.check_weights = answer
    if folder := os.environ.get(WEIGHTS_VARIABLE):
        load_from(Path(folder))
    if (scheme := os.environ.get(QUANTIZATION_VARIABLE, "none")) != "none":
        quantize_loaded(scheme)
    see_bytes()
    Req._check_token_based_finish = ends_at_stop_token
    accumulator = _GenerationStreamAccumulator
    accumulator.accept = tells_versions(accumulator.accept)
    Req.update_finish_state = ends_before_it_is_cut(Req.update_finish_state)
    schedule_batch.release_req = keeps_routes(schedule_batch.release_req)
    collect = SchedulerBatchResultProcessor._maybe_collect_routed_experts
    SchedulerBatchResultProcessor._maybe_collect_routed_experts = collects_kept_routes(collect)
    ALLOC_MEMORY_FUNCS["cpu"] = unpinned
    scheduler.run_scheduler_process(*args, **kwargs)


def tells_versions(accept: Callable[..., None]) -> Callable[..., None]:
    """Let each chunk of a streamed completion tell which weights have sampled the tokens so far.

    SGLang tells it in the last one, which an engine that dies does not send.
    """

    def accepted(self: _GenerationStreamAccumulator, *, req: Req) -> None:
        num_before = len(self.weight_versions)
        accept(self, req=req)
        if len(self.weight_versions) > num_before:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events, self.current_weight_version, req.send_token_offset
            )

    return accepted


def ends_before_it_is_cut(update_finish_state: Callable[..., None]) -> Callable[..., None]:
    """Let a request that is given up end as it would have with the token that it still gets.

    SGLang would not look whether that is its last one; what is asked for after a push would go on
    behind it.
    """

    def update(self: Req, new_accepted_len: int = 1) -> None:
        if new_accepted_len == 0:
            return update_finish_state(self, new_accepted_len)
        given_up, self.to_finish = self.to_finish, None
        update_finish_state(self, new_accepted_len)
        if given_up and not self.finished():
            self.finished_reason = given_up
        return None

    return update


def keeps_routes(release_req: Callable[..., bool]) -> Callable[..., bool]:
    """Let a request whose keys and values are dropped, as for a push, keep the experts with which
    its tokens were sampled: they will be computed anew, and the new weights may choose others."""

    def released(*, req: Req, req_to_token_pool: ReqToTokenPool, **arguments: Any) -> bool:
        capturer = get_global_experts_capturer()
        if capturer and req.return_routed_experts and req.output_ids:
            row, kept = req.kv.req_pool_idx, getattr(req, "kept_routes", [])
            start = req.routed_experts_start_len + sum(map(len, kept))
            routes = capturer.get_topk(row, req.seqlen, req_to_token_pool, start)
            req.kept_routes = [*kept, routes.short()]  # int16: half of SGLang's
        return release_req(req=req, req_to_token_pool=req_to_token_pool, **arguments)

    return released


def collects_kept_routes(collect: Callable[..., None]) -> Callable[..., None]:
    """Let the experts that a request tells at its end be those that it has kept, where it has."""

    def collected(self: SchedulerBatchResultProcessor, req: Req) -> None:
        collect(self, req)
        if req.routed_experts is not None and (kept := getattr(req, "kept_routes", [])):
            rest = req.routed_experts[sum(map(len, kept)) :]
            req.routed_experts = torch.cat([*kept, rest]).to(rest.dtype)

    return collected


def unpinned(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any
) -> Tensor:
    """Memory for the experts of tokens where there is no GPU to page-lock it for."""
    return alloc_with_host_register(dims, dtype, device, False, allocator)


def ends_at_stop_token(self: Req, new_accepted_tokens: list[int]) -> bool:
    """Whether one of these tokens ends the completion: one that the request names.

    SGLang would also end it at tokens that only the tokenizer knows as ends, at which the trainer
    goes on.
    """
    stops = self.sampling_params.stop_token_ids or ()
    for number, token_id in enumerate(new_accepted_tokens):
        if token_id in stops:
            self.finished_reason = FINISH_MATCHED_TOKEN(matched=token_id)
            self.finished_len = len(self.output_ids) - len(new_accepted_tokens) + number + 1
            return True
    return False
