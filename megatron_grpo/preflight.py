"""Checks before any rank starts: sizes, weights and engines.

`prompt_checks.py` checks the data, `resume_checks.py` an earlier run in the run directory.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from checkpoint_convert import ModelShape, check_divisible, check_weights
from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.hf_config import has_other_towers
from checkpoint_convert.quantized.model import check_ranks, quantized_model
from checkpoint_convert.sidecar import sidecar_files
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.folders import latest_step
from megatron_grpo.config.config import Config
from megatron_grpo.config.features import default_of, value_of
from megatron_grpo.config.file import with_file_hashes
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.doctor.packages import TRACKERS
from megatron_grpo.engine_weights.layouts import quantized_engine
from megatron_grpo.engines.http import status_of
from megatron_grpo.engines.server import check_arguments, check_model_served
from megatron_grpo.engines.support import check_kernels
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.hooks import load_hook
from megatron_grpo.launch.launch import check_files
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, check_run_dir, check_token
from megatron_grpo.resume_checks import check_same_run, check_start
from megatron_grpo.workers.http import is_success

if TYPE_CHECKING:
    from megatron_grpo.prompt_checks import Checked

HEALTH_TIMEOUT_SECONDS = 5.0


def preflight(cfg: Config, token: str | None, *, starts_here: bool = True) -> "Checked":
    """Raise ValueError, with the numbers and a legal value, if `cfg` cannot run on this machine.

    Reads the headers of the weights only, tokenizes the data, loads the reward functions in their
    own process, and checks that engines given by address are healthy and accept `token`. With
    `starts_here` the run is about to start on this host, so its CPU is checked, too.
    """
    BatchSchedule.of(cfg.grpo)
    shape = _check_model(cfg)
    if cfg.train.replay is None:
        check_engines(cfg, shape, token)
        quantized_engine(cfg.rollout, shape, cfg.model.dtype)
        check_adapters(cfg.lora, shape)
    check_start(cfg)
    check_files(cfg)
    # After all that names files, as waiting for another process would not bring them.
    check_run_dir(cfg.train.run_dir, starts_here=starts_here)
    cfg = with_file_hashes(cfg)
    check_same_run(cfg)
    for hook in cfg.train.hooks:
        load_hook(hook, cfg)
    if starts_here:
        if cfg.train.replay is None:
            check_kernels(cfg.rollout, shape, cfg.model.dtype)
        _warn_of_slow_dtype(cfg.model.dtype)
        if cfg.train.offload_communicators:
            _check_nccl(os.environ)
    for package in cfg.trackers:
        if importlib.util.find_spec(package) is None:
            use, install = TRACKERS[package]
            raise ValueError(f"{use} needs {package}: `{install}`, or leave it out")
    # Last, since importing Megatron-Core takes seconds, and encoding a data set takes minutes.
    _check_megatron(cfg, shape)
    from megatron_grpo.prompt_checks import check_evaluation, check_prompts, check_reward_models
    from megatron_grpo.rollout.replay import check_replay

    check_loss(cfg)
    check_reward_models(cfg)
    checked = check_prompts(cfg, shape, rehearses=not starts_here)
    cfg = checked.cfg
    check_replay(cfg)
    if cfg.eval.named_sets:
        check_evaluation(cfg, shape)
    return checked


def check_engines(cfg: Config, shape: ModelShape, token: str | None) -> None:
    """Raise ValueError if engines cannot split the model, be started, reached or used."""
    check_model_served(cfg, shape)
    for url in cfg.rollout.base_urls:
        _check_answers(url.rstrip("/"), check_token(token))
    if not cfg.rollout.base_urls:
        check_arguments(cfg.rollout)


def _check_model(cfg: Config) -> ModelShape:
    folder, run_dir = cfg.model.path, cfg.train.run_dir
    cfg.model.check_folder()
    for exported in [run_dir / "hf", *run_dir.glob("hf_step_*")]:
        if folder.resolve().is_relative_to(exported.resolve()):
            raise ValueError(
                f"model.path {folder} would be overwritten by what the run exports to {exported}: "
                "choose another train.run_dir"
            )
    shape = trained_shape(cfg)
    check_divisible(shape, cfg.dims)
    check_weights(folder, shape)
    sidecar_files(folder)  # the files that every checkpoint and export copies
    of_model = shape, NAMES[cfg.model.dtype], cfg.rollout.quantization_ignore
    if model := quantized_model(cfg.train.export_quantization, *of_model):
        check_ranks(shape, cfg.dims, model)
    if has_other_towers(folder):
        check_text_tower(cfg)
    if cfg.model.freeze_moe_router and shape.moe is None:
        raise ValueError(
            "model.freeze_moe_router true needs a mixture of experts, and this model is dense: "
            "leave it out"
        )
    return shape


def check_text_tower(cfg: Config) -> None:
    """Raise ValueError for features that do not support the text tower of a multimodal model."""
    if cfg.train.export_quantization != "none":
        raise ValueError(
            f"train.export_quantization {cfg.train.export_quantization} is not supported for the "
            f"multimodal model in model.path {cfg.model.path}: set it to none"
        )


def _check_nccl(environ: Mapping[str, str]) -> None:
    """Raise ValueError if the environment keeps NCCL from freeing memory."""
    for name, value in (("NCCL_CUMEM_ENABLE", "0"), ("NCCL_DISABLE_MEM_MANAGER", "1")):
        if environ.get(name) == value:
            raise ValueError(
                f"with {name}={value} in the environment NCCL gives no memory back: unset it, or "
                "set train.offload_communicators=false"
            )


def _warn_of_slow_dtype(name: str) -> None:
    import torch

    from parallel.dtypes import product_dtype

    dtype = getattr(torch, name)
    if product_dtype(dtype) != dtype:
        print(
            f"model.dtype {name}: here, without a GPU and on a CPU without instructions for it, "
            "training takes many times as long as with model.dtype=float32",
            file=sys.stderr,
        )


def check_loss(cfg: Config) -> None:
    """Raise ValueError if the loss function fails in a trial, or takes no key that is set."""
    from megatron_grpo.algorithm.loss_function import OWN_KEYS, LossFunction

    loss, grpo = LossFunction.of(cfg.grpo), cfg.grpo
    taken = {*loss.arguments}
    if "ratio" in loss.inputs or grpo.use_bias_correction_kl:
        taken.add("importance_sampling_level")
    keys = (*OWN_KEYS, "importance_sampling_level") if "loss_type" in grpo.own_functions else ()
    for key in keys:
        value, default = value_of(cfg, f"grpo.{key}"), default_of(cfg, f"grpo.{key}")
        if key not in taken and value != default:
            parameter = key if key in OWN_KEYS else "ratio"
            raise ValueError(
                f"grpo.{key}={value} does nothing: {grpo.loss_type} has no parameter {parameter}"
            )


def _check_megatron(cfg: Config, shape: ModelShape) -> None:
    import torch

    from parallel.megatron_import import import_megatron

    import_megatron()
    from checkpoint_convert.formats.tensor_io import check_values
    from megatron_grpo.policy.lora_targets import check_lora, starting_adapter
    from megatron_grpo.policy.optimizer import check_optimizer
    from megatron_grpo.policy.transformer import transformer_config

    check_optimizer(cfg.optimizer)
    check_lora(cfg.lora, shape, cfg.dims.tensor)
    if not latest_step(cfg.train.run_dir / "checkpoints") and (
        stored := starting_adapter(cfg.lora, shape)
    ):
        check_values(stored.places)
    transformer_config(
        shape,
        cfg.dims,
        dtype=getattr(torch, cfg.model.dtype),
        sequence_parallel=cfg.parallel.sequence_parallel,
        overrides=cfg.model.megatron,
    )


def _check_answers(url: str, token: str) -> None:
    """Raise ValueError if a server at `url` is not an engine of ours, ConnectionError if none
    answers."""
    status, text = status_of("GET", url, "/health", HEALTH_TIMEOUT_SECONDS)
    # /health needs no token. /load does, and changes nothing.
    if is_success(status):
        status, text = status_of("GET", url, "/load", HEALTH_TIMEOUT_SECONDS, token)
    if status == HTTPStatus.UNAUTHORIZED:
        raise ValueError(
            f"rollout engine {url} refuses the token in {TOKEN_VARIABLE}: give the one "
            "that the engine was started with"
        )
    if not is_success(status):
        # Unlike a 4xx, an absent engine may come back: ConnectionError lets a requeued job retry.
        raise (ValueError if 400 <= status < 500 else ConnectionError)(
            f"rollout engine {url} is not healthy ({text}): start it, or correct rollout.base_urls"
        )
