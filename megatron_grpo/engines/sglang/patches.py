"""Attributes of SGLang that our code in its processes replaces: `PATCHES`."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils import is_cpu
from sglang.srt.utils.weight_versions import compute_weight_version_spans
from torch import Tensor
from torch.nn import Module

from checkpoint_convert import read_shape
from checkpoint_convert.megatron import file_layout
from checkpoint_convert.quantized.scheme import CONFIG_KEYS, ignored_modules
from checkpoint_convert.quantized.shard import quantized_tensors
from checkpoint_convert.text_tower import text_name
from checkpoint_convert.weights import whole_tensors
from megatron_grpo.engines.patches import Patch, apply
from megatron_grpo.engines.sglang.images import PromptReader, scale
from megatron_grpo.engines.sglang.model_folder import WEIGHTS_VARIABLE
from megatron_grpo.engines.sglang.variables import QUANTIZATION_VARIABLE
from megatron_grpo.engines.sglang.worker import answer_calls
from parallel import Layout, ShardMapping
from parallel.views import as_whole

Weights = Iterator[tuple[str, Tensor]]


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of that name, patched: the main function of each worker."""
    apply(PATCHES)
    scheduler.run_scheduler_process(*args, **kwargs)


def _scheme() -> str | None:
    scheme = os.environ.get(QUANTIZATION_VARIABLE, "none")
    return None if scheme == "none" else scheme


def read_weights(
    all_weights: Callable[..., Weights],
    loader: DefaultModelLoader,
    model_config: ModelConfig,
    model: Module,
) -> Weights:
    """Read the folder with the weights, dequantised, or quantised as in pushes."""
    folder = os.environ.get(WEIGHTS_VARIABLE)
    if scheme := _scheme():
        ignored = ignored_modules(getattr(model_config.hf_config, CONFIG_KEYS[0]))
        found = quantized_tensors(Path(folder or model_config.model_path), scheme, ignored)
    elif folder:
        found = text_tensors(Path(folder))
    else:
        found = all_weights(loader, model_config, model)
    if not model_config.is_multimodal:
        return found
    # SGLang would skip some tensors under transformers' names.
    return ((text_name(name), values) for name, values in found)


def text_tensors(folder: Path) -> Weights:
    """Name and values of every tensor of text in a folder. Stacks of transposed experts (Qwen3-VL)
    are split, as SGLang's text model cannot read them."""
    shape = read_shape(folder)
    if shape.moe is not None and shape.moe.stacks == "transposed":
        return _tensors_apart(folder, file_layout(shape))
    return whole_tensors(folder)


def _tensors_apart(folder: Path, layout: Layout) -> Weights:
    # Every worker reads whole stacks into host memory, two at a time (Qwen3-VL-235B: 3.2 and
    # 1.6 GB).
    pieces: dict[str, list[ShardMapping]] = {}
    for piece in layout.pieces:
        pieces.setdefault(piece.local, []).append(piece)
    for name, values in whole_tensors(folder):
        stack = values.view(layout.shapes[name])
        for piece in pieces[name]:
            yield piece.tensor, as_whole(stack[piece.local_box.slices], piece.axes)


def check_loaded(
    load_model: Callable[..., Module],
    loader: DefaultModelLoader,
    *,
    model_config: Any,
    **arguments: Any,
) -> Module:
    """Load a model, check its scales, and let its vision tower take patches of bytes."""
    model = load_model(loader, model_config=model_config, **arguments)
    if _scheme():
        check_scales(model)
    if model_config.is_multimodal:
        tower: Any = model.visual
        tower.register_forward_pre_hook(scale(model_config.model_path))
    return model


def check_scales(model: Module) -> None:
    """Raise ValueError if SGLang has loaded no scales into a linear layer."""
    unset = torch.finfo(torch.float32).min  # SGLang's initial value of scales
    scales = {name: p for name, p in model.named_parameters() if name.endswith("weight_scale_inv")}
    if missing := [name for name, scale in scales.items() if (scale == unset).any()]:
        raise ValueError(f"SGLang has loaded no scales into {missing[0]}: use rollout.engine=vllm")


def make_tokenizer_alone(prepare: Callable[[Any], None], process: Any) -> None:
    """Make a model's tokenizer without its processor of images."""
    config = process.model_config
    is_multimodal, config.is_multimodal = config.is_multimodal, False
    prepare(process)
    config.is_multimodal = is_multimodal


def read_prompts(prepare: Callable[[Any], None], manager: TokenizerManager) -> None:
    make_tokenizer_alone(prepare, manager)
    if manager.model_config.is_multimodal:
        manager.mm_processor = PromptReader(manager.model_config.hf_config)


def end_at_stop_token(_: Callable[..., bool], req: Req, new_accepted_tokens: list[int]) -> bool:
    """End a completion at the stop tokens of its request, and at no others."""
    stops = req.sampling_params.stop_token_ids or ()
    for number, token_id in enumerate(new_accepted_tokens):
        if token_id in stops:
            req.finished_reason = FINISH_MATCHED_TOKEN(matched=token_id)
            req.finished_len = len(req.output_ids) - len(new_accepted_tokens) + number + 1
            return True
    return False


def end_before_abort(update: Callable[..., None], req: Req, new_accepted_len: int = 1) -> None:
    """End an aborted request as its last token does, if that ends it; else as aborted."""
    if new_accepted_len == 0:
        update(req, new_accepted_len)
        return
    aborted, req.to_finish = req.to_finish, None
    update(req, new_accepted_len)
    if aborted and not req.finished():
        req.finished_reason = aborted


def send_versions_of_chunks(
    accept: Callable[..., None], sent: _GenerationStreamAccumulator, *, req: Req
) -> None:
    """Send the weight versions of the tokens so far with each chunk of a stream."""
    num_before = len(sent.weight_versions)
    accept(sent, req=req)
    if len(sent.weight_versions) > num_before:
        sent.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events, sent.current_weight_version, req.send_token_offset
        )


def keep_routes(
    release_req: Callable[..., bool],
    *,
    req: Req,
    req_to_token_pool: ReqToTokenPool,
    **arguments: Any,
) -> bool:
    """Keep the experts of a request whose keys and values are dropped."""
    capturer = get_global_experts_capturer()
    if capturer and req.return_routed_experts and req.output_ids:
        # Before `release_req`, which frees the row. It may be dropped again: earlier parts stay.
        row, kept = req.kv.req_pool_idx, getattr(req, "kept_routes", [])
        start = req.routed_experts_start_len + sum(map(len, kept))
        routes = capturer.get_topk(row, req.seqlen, req_to_token_pool, start)
        req.kept_routes = [*kept, routes.short()]  # int16: half of SGLang's
    return release_req(req=req, req_to_token_pool=req_to_token_pool, **arguments)


def collect_kept_routes(
    collect: Callable[..., None], processor: SchedulerBatchResultProcessor, req: Req
) -> None:
    """Return a request's kept experts in place of the experts of its recomputed tokens."""
    collect(processor, req)
    if req.routed_experts is not None and (kept := getattr(req, "kept_routes", [])):
        rest = req.routed_experts[sum(map(len, kept)) :]
        req.routed_experts = torch.cat([*kept, rest]).to(rest.dtype)


def lock_on_gpus(register: Callable[..., None], *args: Any) -> None:
    if not is_cpu():
        register(*args)


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler_components.weight_updater:"
        "SchedulerWeightUpdaterManager.check_weights",
        replacement=answer_calls,
        because_of="p = runner.check_weights(",
        why="the one way into all workers that brings data back: calls of the trainer travel as "
        "its actions",
    ),
    Patch(
        target="sglang.srt.model_loader.loader:DefaultModelLoader._get_all_weights",
        replacement=read_weights,
        because_of="primary_weights = DefaultModelLoader.Source.init_new(model_config, model)",
        why="it has no way to load other weights than are stored: dequantised, quantised by a "
        "scheme of ours, or of one tower",
        upstream="https://github.com/sgl-project/sglang/pull/15440",
    ),
    Patch(
        target="sglang.srt.model_loader.loader:DefaultModelLoader.load_model",
        replacement=check_loaded,
        because_of="model = _initialize_model(",
        why="scales of some layers are left out without an error; and vision towers would take "
        "pixels that another processor has scaled",
        upstream="https://github.com/sgl-project/sglang/pull/29323",
    ),
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.init_tokenizer",
        replacement=make_tokenizer_alone,
        because_of="self.processor = get_processor(",
        why="a processor of images that nothing uses would be made",
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_manager:"
        "TokenizerManager.init_tokenizer_and_processor",
        replacement=read_prompts,
        because_of="self.mm_processor = get_mm_processor(",
        why="images would be read once more, by other code than the trainer's: see images.py",
    ),
    Patch(
        target="sglang.srt.managers.schedule_batch:Req._check_token_based_finish",
        replacement=end_at_stop_token,
        because_of="matched_eos |= token_id == self.tokenizer.eos_token_id",
        why="completions would also end at tokens that only the tokenizer knows as ends, at which "
        "the trainer goes on",
    ),
    Patch(
        target="sglang.srt.managers.schedule_batch:Req.update_finish_state",
        replacement=end_before_abort,
        because_of="self.finished_reason = self.to_finish",
        why="an aborted request gets one more token, which is not checked: after a push its rest "
        "would go on behind the last token of a completion",
        upstream="https://github.com/sgl-project/sglang/pull/37295",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.output_streamer:"
        "_GenerationStreamAccumulator.accept",
        replacement=send_versions_of_chunks,
        because_of="self.weight_versions.append(None)",
        why="the last chunk of a stream has them alone, and an engine that dies does not send it",
        upstream="https://github.com/sgl-project/sglang/pull/32660",
    ),
    Patch(
        target="sglang.srt.managers.schedule_batch:release_req",
        replacement=keep_routes,
        because_of="req.reset_for_retract()",
        why="the experts with which tokens were sampled are lost with their keys and values, as "
        "for a push: new weights may choose others when these are computed anew",
        upstream="https://github.com/sgl-project/sglang/pull/24001",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.batch_result_processor:"
        "SchedulerBatchResultProcessor._maybe_collect_routed_experts",
        replacement=collect_kept_routes,
        because_of="req.routed_experts = capturer.get_topk(",
        why="the other half of the patch before",
        upstream="https://github.com/sgl-project/sglang/pull/24001",
    ),
    Patch(
        target="sglang.srt.mem_cache.pool_host.common:_cuda_host_register",
        replacement=lock_on_gpus,
        because_of="cudart = torch.cuda.cudart()",
        why="memory for the experts of tokens is page-locked by CUDA without a GPU, too",
        upstream="https://github.com/sgl-project/sglang/pull/37285",
    ),
)
