"""Advice of a plan, checked: the changed config must itself be accepted."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoint_convert import ModelShape, check_divisible
from megatron_grpo.config.checks import check_config
from megatron_grpo.config.config import Config
from megatron_grpo.config.grpo import check_shared_prompts
from megatron_grpo.config.megatron_fields import check_fp8_model
from megatron_grpo.config.section import Section, as_yaml
from megatron_grpo.config.vision import mrope_axes
from megatron_grpo.engines.support import check_drafts, check_served
from megatron_grpo.planning.block import uses_transformer_engine
from megatron_grpo.planning.card import card_named
from megatron_grpo.planning.precision import check_fp8_card
from megatron_grpo.planning.workload import Job
from megatron_grpo.policy.lora_targets import check_lora

NEEDS_FLASH = (
    "Transformer Engine needs flash-attn on {gpu}, where cuDNN has no attention over packed "
    "sequences"
)

Changes = Mapping[str, Mapping[str, Any]]
"""Fields with other values, by section."""


def overrides(changes: Changes) -> list[str]:
    """The changes as overrides, to paste after the config's name."""
    return [
        f"{section}.{name}={as_yaml(value)}"
        for section, fields in changes.items()
        for name, value in fields.items()
    ]


def legal(job: Job, changes: Changes) -> Job | None:
    """The job with these fields, checked as a config that has them is; None if it is refused."""
    try:
        cfg = changed(job.cfg, changes)
        check_job(other := replace(job, cfg=cfg))
    except ValueError:
        return None
    return other


def changed(cfg: Config, changes: Changes) -> Config:
    """`cfg` with these fields. Raises ValueError if it is refused."""
    sections: dict[str, Section] = {name: getattr(cfg, name) for name in changes}
    other = cfg.model_copy(
        update={
            name: type(section).model_validate(section.model_dump() | dict(changes[name]))
            for name, section in sections.items()
        }
    )
    check_config(other)
    return other


def with_megatron(cfg: Config, **fields: object) -> Changes:
    """The change of fields of `model.megatron`."""
    return {"model": {"megatron": {**cfg.model.megatron, **fields}}}


def check_job(job: Job) -> None:
    """Raise ValueError, with a legal value, if the model or the card cannot do what the config asks
    for."""
    cfg, shape = job.cfg, job.shape
    check_divisible(shape, cfg.dims)
    check_lora(cfg.lora, shape, cfg.dims.tensor)
    check_shared_prompts(cfg.grpo, shape)
    check_served(cfg.rollout, shape)
    check_drafts(cfg, shape)
    check_fp8_card(cfg, job.card)
    check_fp8_model(cfg.model.megatron, shape, cfg.dims)


def flash_lines(job: Job, gpu: str) -> list[str]:
    """A line if flash-attn is needed, with the setting that avoids it where that is legal."""
    if card_named(gpu).packs_sequences or _has_own_attention(job.cfg, job.shape):
        return []
    local = legal(job, with_megatron(job.cfg, transformer_impl="local"))
    instead = "; or set model.megatron.transformer_impl=local" if local else ""
    return [NEEDS_FLASH.format(gpu=gpu) + instead]


def _has_own_attention(cfg: Config, shape: ModelShape) -> bool:
    """Whether attention is not Transformer Engine's: see `fused_layer_spec`."""
    return (
        not uses_transformer_engine(cfg)
        or cfg.grpo.shared_prompts
        or bool(mrope_axes(cfg))
        or shape.has_sinks
        or (cfg.dims.context > 1 and shape.window is not None)
    )
