"""Checks of a run against the run in its directory, and against the run that it starts from."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from checkpoint_convert import read_shape
from checkpoint_convert.shape import differing_fields
from checkpoint_convert.sidecar import CHECKPOINT_FOLDER
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.folders import checkpoint_at, instead_of, latest_step, step_folder
from megatron_grpo.checkpoints.manifest import read_manifest
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config, load_config
from megatron_grpo.config.megatron_fields import PERFORMANCE_FIELDS
from megatron_grpo.config.optimizer import OPTIMIZER_MEMORY_KEYS
from megatron_grpo.reporting.tracking import last_step
from parallel.alignment import round_up
from parallel.words import counted

EXPORTED = "train.export_quantization"
"""A changeable key, but in a run that trains for the export: see `Config.trained_quantization`."""
# Keys that a resumed run may change: length, speed and place, but nothing that changes learning.
# Paths of model and data are here because files may move: `_check_same_model` detects a different
# model, and the fingerprint of the prompts in the checkpoint different data.
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
    EXPORTED,
    "train.keep_checkpoints",
    "train.keep_every",
    "train.keep_best",
    "train.hooks",
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
    "agent.listen",
    "agent.timeout",
    "agent.memory_megabytes",
    "eval.",
    "wandb.",
    "trackio.",
    "swanlab.",
)
OF_SOURCE = re.compile(r"^sources\.by_name\..+?\.(?=(reward|environment|agent)\.)")
"""Prefix of a source's key before the run's key: `sources.by_name.math.`."""

DATE = "data.date"
FROM_EXPORT = "model.path=<export of that run>"
"""Start of a run whose `KINDS_OF_STATE` differ from the earlier run's, or of one with adapters."""
FROM_ADAPTERS = "lora.adapter_path=<export of that run>"
FROM_MERGED = "model.path=<what `checkpoint-convert merge` makes of an export of that run>"
OF_ADAPTERS = tuple(
    f"lora.{name}"
    for name in ("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules")
)
"""Keys that must be equal for a run to start from another run's adapters."""
KINDS_OF_STATE = {
    "model.mtp_num_layers": 0,
    "model.freeze_vision": True,
    "optimizer.optimizer": "adam",
}
"""Keys that decide which optimizer state a checkpoint has, with their defaults."""


def check_same_run(cfg: Config) -> None:
    """Raise ValueError if `train.run_dir` holds a different run from `cfg`.

    The message lists every key that differs, except those that a resumed run may change. Also
    raises if that run's checkpoints are gone, as starting over would drop its records.
    """
    checkpoints = cfg.train.run_dir / "checkpoints"
    if (step := latest_step(checkpoints)) == 0:
        _check_never_saved(cfg.train.run_dir)
        return  # nothing has been learnt that a different config could spoil
    saved = _saved_config(cfg.train.run_dir)
    before = dict(_flatten(yaml.safe_load(dump_config(saved))))
    now = dict(_flatten(yaml.safe_load(dump_config(cfg))))
    if None in (before[DATE], now[DATE]):  # a run from before this key, or the run's own
        now[DATE] = before[DATE]
    is_learnt = saved.trained_quantization != cfg.trained_quantization
    changeable = tuple(key for key in CHANGEABLE if not (is_learnt and key == EXPORTED))
    differing = [
        f"{key}: {before.get(key, 'not set')} before, {now.get(key, 'not set')} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not OF_SOURCE.sub("", key).startswith(changeable)
    ]
    if differing:
        start = _start_from(before, now) or f"train.init_from={cfg.train.run_dir}"
        raise ValueError(
            f"train.run_dir {cfg.train.run_dir} holds a run with another config: restore the keys "
            "below, or remove the folder. To go on from its weights with the new values, start a "
            f"run in another train.run_dir with {start}\n  " + "\n  ".join(differing)
        )
    if before["model.path"] != now["model.path"]:
        _check_same_model(step_folder(checkpoints, step) / CHECKPOINT_FOLDER, cfg.model.path)


def _start_from(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Override that starts a run with config `now` from the weights of a run with config `before`.
    Empty if `now` can start from that run's checkpoints."""
    if before["lora.r"]:
        are_alike = all(before[key] == now[key] for key in OF_ADAPTERS)
        return FROM_ADAPTERS if are_alike else FROM_MERGED
    is_other = any(before[key] != now[key] for key in KINDS_OF_STATE)
    return FROM_EXPORT if is_other or now["lora.r"] else ""


def check_start(cfg: Config) -> None:
    """Raise ValueError if a new run cannot start from `train.init_from`; a resumed run ignores the
    key."""
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
    # End tokens may differ: an export has the end tokens that its run trained with.
    _check_same_model(kept, cfg.model.path, but_for=("eos_token_ids",))
    # As plain YAML, without validation: keys of that run may have been renamed since.
    saved = dict(_flatten(yaml.safe_load((checkpoint / "config.yaml").read_text(encoding="utf-8"))))
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
    """Raise ValueError for records of more steps than a run can take without a checkpoint."""
    if (last := last_step(run_dir)) == 0:
        return
    cfg = _saved_config(run_dir)
    interval = round_up(cfg.train.save_interval, BatchSchedule.of(cfg.grpo).updates_per_generation)
    # Twice, as the first checkpoint is written in the background, and complete before the second.
    if last > 2 * interval:
        raise ValueError(
            f"train.run_dir {run_dir} holds the records of {last} steps, and its checkpoints, one "
            f"every {counted(interval, 'step')}, are gone: put them back into "
            f"{run_dir / 'checkpoints'}, choose another folder, or remove this one"
        )


def _saved_config(run_dir: Path) -> Config:
    """Read the config of the run there; keys newer than the file have the defaults that it ran
    with."""
    saved = run_dir / "config.yaml"
    try:
        return load_config(saved)
    except (OSError, ValueError) as error:
        raise ValueError(f"{saved}: {error}") from None


def _check_same_model(kept: Path, folder: Path, but_for: Collection[str] = ()) -> None:
    """Raise ValueError if `folder` describes a different model from `kept`, a checkpoint's copy.
    Weights are not compared: all weights except the reference's are read from the checkpoint."""
    but_for = (*but_for, "num_mtp_layers")  # a checkpoint lists only trained ones
    differing = differing_fields(read_shape(kept), read_shape(folder), but_for=but_for)
    if differing:
        raise ValueError(
            f"model.path {folder} is another model than {kept}, which was trained:\n  "
            + "\n  ".join(differing)
        )


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
