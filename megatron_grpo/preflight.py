"""Checks before any rank starts: sizes, weights and engines; `prompt_checks.py` checks the data."""

import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from checkpoint_convert import ModelShape, check_divisible, check_weights, read_shape
from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.hf_config import has_other_towers
from checkpoint_convert.quantized_model import check_ranks, quantized_model
from checkpoint_convert.shape import differing_fields
from checkpoint_convert.sidecar import CHECKPOINT_FOLDER, sidecar_files
from checkpoint_convert.vllm import check_engine_dims
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.folders import checkpoint_at, instead_of, latest_step, step_folder
from megatron_grpo.checkpoints.manifest import read_manifest
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config, load_config
from megatron_grpo.config.grpo import check_shared_prompts
from megatron_grpo.config.megatron_fields import PERFORMANCE_FIELDS
from megatron_grpo.config.optimizer import OPTIMIZER_MEMORY_KEYS
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.doctor.packages import TRACKERS
from megatron_grpo.engines.drafters import check_drafts
from megatron_grpo.engines.kernels import check_kernels, check_served, check_towers_served
from megatron_grpo.engines.layouts import engine_dims, quantized_engine
from megatron_grpo.engines.server import check_arguments
from megatron_grpo.engines.sglang.args import check_folder_loaded
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.launch.launch import check_files
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, bearer, check_run_dir, check_token
from megatron_grpo.reporting.tracking import last_step

HEALTH_TIMEOUT_SECONDS = 5.0

# Keys that a resumed run may change: how long, how fast and where it runs, but not what it learns.
# Model and data may have moved: a different model is detected by `_check_same_model`, and different
# data by the fingerprint of the prompts in the checkpoint.
CHANGEABLE = (
    "model.path",
    *(f"model.megatron.{name}" for name in PERFORMANCE_FIELDS),
    "data.path",
    "data.subset",
    "data.split",
    "lora.adapter_path",
    "lora.sync",
    "train.run_dir",
    "train.num_steps",
    "train.num_epochs",
    "train.max_tokens_per_microbatch",
    "train.offload",
    "train.save_interval",
    "train.export_interval",
    "train.export_quantization",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.hang_timeout",
    "train.max_skipped_steps",
    "train.save_generations",
    "train.log_tokens",
    "train.print_completions",
    "train.profile_steps",
    "train.profile_ranks",
    "train.tensorboard",
    *(f"optimizer.{name}" for name in OPTIMIZER_MEMORY_KEYS),
    "parallel.",
    "rollout.engine",
    "rollout.base_urls",
    "rollout.num_engines",
    "rollout.tensor_parallel_size",
    "rollout.data_parallel_size",
    "rollout.enable_sleep_mode",
    "rollout.startup_timeout",
    "rollout.request_timeout",
    "rollout.health_timeout",
    "rollout.stall_timeout",
    "rollout.python",
    "rollout.vllm",
    "rollout.sglang",
    "rollout.update_weights_bucket_megabytes",
    "rollout.weight_transport",
    "reward.timeout",
    "reward.max_failed_fraction",
    "reward.max_concurrent_calls",
    "reward.num_workers",
    "reward.memory_megabytes",
    "environment.timeout",
    "environment.memory_megabytes",
    "eval.",
    "wandb.",
    "trackio.",
    "swanlab.",
)
OF_SOURCE = re.compile(r"^sources\.by_name\..+?\.(?=(reward|environment)\.)")
"""What keys of a source have before those of the run."""


def preflight(cfg: Config, token: str | None, *, starts_here: bool = True) -> tuple[Config, str]:
    """Raise ValueError, with the numbers and a legal value, if `cfg` cannot run on this machine.

    Reads the headers of the weights, not the weights, tokenizes the data, loads the reward
    functions in their own process, and checks that engines given by address are healthy and accept
    `token`. `starts_here`: whether the run is about to start on this host, so that its CPU matters.
    Returns `cfg` with `train.num_epochs` as steps, and the first prompt as the model will see it.
    """
    BatchSchedule.of(cfg.grpo)
    check_run_dir(cfg.train.run_dir, starts_here=starts_here)
    shape = _check_model(cfg)
    if cfg.train.replay is None:
        check_engines(cfg, shape, token)
        quantized_engine(cfg.rollout, shape, cfg.model.dtype)
        check_adapters(cfg.lora, shape)
    check_same_run(cfg)
    check_start(cfg)
    check_files(cfg)
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

    check_reward_models(cfg)
    cfg, sample = check_prompts(cfg, shape)
    check_replay(cfg)
    if cfg.eval.named_sets:
        check_evaluation(cfg, shape)
    return cfg, sample


def check_engines(cfg: Config, shape: ModelShape, token: str | None) -> None:
    """Raise ValueError if the engines cannot split the model, be started, reached or used."""
    rollout = cfg.rollout
    check_engine_dims(shape, engine_dims(rollout))
    check_served(rollout, shape)
    check_towers_served(cfg.model, rollout)
    if rollout.engine == "sglang":
        check_folder_loaded(cfg.model, rollout)
    check_drafts(cfg, shape)
    check_shared_prompts(cfg.grpo, shape)
    for url in rollout.base_urls:
        _check_answers(url.rstrip("/"), check_token(token))
    if not rollout.base_urls:
        check_arguments(rollout)


FROM_EXPORT = "model.path=<export of that run>"
"""From where a run starts with other `KINDS_OF_STATE` than another, or with adapters."""
FROM_ADAPTERS = "lora.adapter_path=<export of that run>"
FROM_MERGED = "model.path=<what `checkpoint-convert merge` makes of an export of that run>"
OF_ADAPTERS = tuple(
    f"lora.{name}"
    for name in ("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules")
)
"""Keys in which a run must be like another to start from its adapters."""
KINDS_OF_STATE = {
    "model.mtp_num_layers": 0,
    "model.freeze_vision": True,
    "optimizer.optimizer": "adam",
}
"""Keys that say of which weights a checkpoint has the state of an optimizer, and of which one, with
their defaults."""


def check_same_run(cfg: Config) -> None:
    """Raise ValueError if `train.run_dir` holds a different run from the one that `cfg` describes.

    The message lists every key that differs, except those that a resumed run may change. Also
    raises if that run's checkpoints are gone, as starting over would drop its records.
    """
    checkpoints = cfg.train.run_dir / "checkpoints"
    if (step := latest_step(checkpoints)) == 0:
        _check_never_saved(cfg.train.run_dir)
        return  # nothing has been learnt that a different config could spoil
    before = dict(_flatten(yaml.safe_load(dump_config(_saved_config(cfg.train.run_dir)))))
    now = dict(_flatten(yaml.safe_load(dump_config(cfg))))
    differing = [
        f"{key}: {before.get(key, 'not set')} before, {now.get(key, 'not set')} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not OF_SOURCE.sub("", key).startswith(CHANGEABLE)
    ]
    if differing:
        start = _start_from(before, now) or f"train.init_from={cfg.train.run_dir}"
        raise ValueError(
            f"train.run_dir {cfg.train.run_dir} holds a run with another config: set what differs "
            "as before, or remove it. To go on from its weights with what differs, start a run in "
            f"another train.run_dir with {start}\n  " + "\n  ".join(differing)
        )
    if before["model.path"] != now["model.path"]:
        _check_same_model(step_folder(checkpoints, step) / CHECKPOINT_FOLDER, cfg.model.path)


def _start_from(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """From what a run of the config `now` can start that goes on from the weights of the run of
    `before`; empty if from its checkpoints."""
    if before["lora.r"]:
        are_alike = all(before[key] == now[key] for key in OF_ADAPTERS)
        return FROM_ADAPTERS if are_alike else FROM_MERGED
    is_other = any(before[key] != now[key] for key in KINDS_OF_STATE)
    return FROM_EXPORT if is_other or now["lora.r"] else ""


def check_start(cfg: Config) -> None:
    """Raise ValueError if a new run cannot start from `train.init_from`; a resumed one does not."""
    if cfg.train.init_from is None or latest_step(cfg.train.run_dir / "checkpoints"):
        return
    checkpoint = checkpoint_at(cfg.train.init_from)
    try:
        read_manifest(checkpoint)
    except ValueError as error:
        raise ValueError(
            f"train.init_from {checkpoint} cannot be used: {error}; {instead_of(checkpoint)}"
        ) from None
    kept = checkpoint / CHECKPOINT_FOLDER
    # An export has the end tokens with which its run trained.
    _check_same_model(kept, cfg.model.path, but_for=("eos_token_ids",))
    # As text: keys of that run may have other names by now.
    saved = dict(_flatten(yaml.safe_load((checkpoint / "config.yaml").read_text())))
    now = dict(_flatten(cfg.model_dump()))
    if saved.get("lora.r"):
        raise ValueError(
            f"train.init_from {checkpoint} has adapters alone: replace it by {FROM_MERGED}"
        )
    for key, default in KINDS_OF_STATE.items():
        if (before := saved.get(key, default)) != now[key]:
            raise ValueError(
                f"train.init_from {checkpoint} is of a run with {key}={before}: set that, or "
                f"replace train.init_from by {FROM_EXPORT}"
            )


def _check_never_saved(run_dir: Path) -> None:
    """Raise ValueError for records of more steps than a run can take without a checkpoint.

    The first checkpoint is written in the background, and is complete before the second is begun.
    """
    if (last := last_step(run_dir)) == 0:
        return
    interval = _saved_config(run_dir).train.save_interval
    if last > 2 * interval:
        raise ValueError(
            f"train.run_dir {run_dir} holds the records of {last} steps, and its checkpoints, one "
            f"every {interval} steps, are gone: put them back into {run_dir / 'checkpoints'}, "
            "choose another folder, or remove this one"
        )


def _saved_config(run_dir: Path) -> Config:
    """The config of the run there; keys newer than it have their defaults, which is how it ran."""
    saved = run_dir / "config.yaml"
    try:
        return load_config(saved)
    except (OSError, ValueError) as error:
        raise ValueError(f"{saved}: {error}") from None


def _check_same_model(kept: Path, folder: Path, but_for: Collection[str] = ()) -> None:
    """Raise ValueError if `folder` describes a different model from `kept`, a checkpoint's copy.

    Weights are not compared: all but the reference's are read from the checkpoint.
    """
    but_for = (*but_for, "num_mtp_layers")  # a checkpoint has only those that were trained
    differing = differing_fields(read_shape(kept), read_shape(folder), but_for=but_for)
    if differing:
        raise ValueError(
            f"model.path {folder} is another model than {kept}, which was trained:\n  "
            + "\n  ".join(differing)
        )


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
    """Raise ValueError for what is not there for the text tower of a multimodal model."""
    if cfg.train.export_quantization != "none":
        raise ValueError(
            f"train.export_quantization is {cfg.train.export_quantization}, and model.path "
            f"{cfg.model.path} has other towers beside that of text; supported: none"
        )


def _check_nccl(environ: Mapping[str, str]) -> None:
    """Raise ValueError if the environment keeps NCCL from giving memory back."""
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


def _check_megatron(cfg: Config, shape: ModelShape) -> None:
    import torch

    from parallel.megatron_import import import_megatron

    import_megatron()
    from megatron_grpo.policy.lora_targets import check_lora, starting_adapter
    from megatron_grpo.policy.optimizer import check_optimizer
    from megatron_grpo.policy.transformer import transformer_config

    check_optimizer(cfg.optimizer)
    check_lora(cfg.lora, shape, cfg.dims.tensor)
    if not latest_step(cfg.train.run_dir / "checkpoints"):
        starting_adapter(cfg.lora, shape)
    transformer_config(
        shape,
        cfg.dims,
        dtype=getattr(torch, cfg.model.dtype),
        sequence_parallel=cfg.parallel.sequence_parallel,
        overrides=cfg.model.megatron,
    )


def _check_answers(url: str, token: str) -> None:
    """Raise ValueError if what answers is no engine of ours, ConnectionError if nothing does."""
    try:
        # trust_env=False: proxies set in the environment are not for engines.
        with httpx.Client(base_url=url, timeout=HEALTH_TIMEOUT_SECONDS, trust_env=False) as engine:
            engine.get("/health").raise_for_status()
            # Any route that requires the token and changes nothing would do.
            response = engine.get("/load", headers=bearer(token))
            if response.status_code == httpx.codes.UNAUTHORIZED:
                raise ValueError(
                    f"rollout engine {url} refuses the token in {TOKEN_VARIABLE}: give the one "
                    "that the engine was started with"
                )
            response.raise_for_status()
    except httpx.HTTPError as error:
        is_other = isinstance(error, httpx.HTTPStatusError) and error.response.is_client_error
        # An engine that is away may come back, so a job that is requeued may succeed.
        raise (ValueError if is_other else ConnectionError)(
            f"rollout engine {url} is not healthy ({error}): start it, or correct rollout.base_urls"
        ) from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
