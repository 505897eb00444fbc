"""Features of a run by the names of docs/compatibility.md, and whether a config has them on.

Most names are those of keys: `KEY` is on with a value that is neither empty nor the default,
`KEY: VALUE` or `KEY: VALUE or VALUE` with that value, and `A with B` if both are. `FEATURES`
defines the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import parts_moved
from megatron_grpo.config.reward import REWARD_MODEL
from megatron_grpo.config.section import Section, as_yaml


@dataclass(frozen=True)
class Feature:
    """A feature that more than the value of a key decides."""

    is_on: Callable[[Config], object]
    keys: tuple[str, ...] = ()
    """The keys that turn it on, which messages show, but for defaults; none: they show its name."""


_AGENT = ("agent.command", "agent.function", "agent.tools", "agent.mcp_servers", "agent.listen")
_DRAFTS = "rollout.vllm.speculative_config"
_BALANCING = "model.megatron.moe_router_load_balancing_type"


def _has_reward_model(cfg: Config) -> bool:
    functions = (each for reward in cfg.rewards.values() for each in reward.functions)
    return any(function.name == REWARD_MODEL for function in functions)


def _names_reference(cfg: Config) -> bool:
    return cfg.train.offload != "all" and "reference" in parts_moved(cfg.train.offload)


def _drafts_without_push(cfg: Config) -> bool:
    """Whether engines draft with weights that no push brings."""
    method = cfg.rollout.drafts.get("method")
    is_trained = cfg.model.mtp_num_layers and cfg.rollout.drafts_with_mtp
    return method not in (None, "ngram", "ngram_gpu", "suffix") and not is_trained


def _clips_below(cfg: Config) -> bool:
    return cfg.grpo.has_clip and cfg.grpo.loss_type != "cispo"


FEATURES = {
    # Models, memory and meshes.
    "a loss that balances routers": Feature(
        lambda cfg: cfg.model.megatron.get("moe_router_load_balancing_type") not in (None, "none"),
        (_BALANCING,),
    ),
    "lora.sync: adapter": Feature(  # of a run with engines, which would get them
        lambda cfg: cfg.lora.is_served and cfg.train.replay is None, ("lora.sync",)
    ),
    "train.offload": Feature(lambda cfg: parts_moved(cfg.train.offload), ("train.offload",)),
    "train.offload of weights": Feature(
        lambda cfg: "weights" in parts_moved(cfg.train.offload), ("train.offload",)
    ),
    "train.offload that names the reference": Feature(_names_reference, ("train.offload",)),
    # Engines.
    "a correction for older weights": Feature(
        lambda cfg: cfg.grpo.old_logprobs == "rollout" or cfg.grpo.rollout_importance_sampling_mode
    ),
    "drafts of another model": Feature(
        lambda cfg: cfg.rollout.drafts.get("model") not in (None, str(cfg.model.path)),
        (f"{_DRAFTS}.model",),
    ),
    "drafts of fewer ranks": Feature(
        lambda cfg: "draft_tensor_parallel_size" in cfg.rollout.drafts,
        (f"{_DRAFTS}.draft_tensor_parallel_size",),
    ),
    "drafts of the trained layer": Feature(
        lambda cfg: cfg.model.mtp_num_layers and cfg.rollout.drafts_with_mtp,
        ("model.mtp_num_layers", f"{_DRAFTS}.method"),
    ),
    "drafts of weights that are not pushed": Feature(_drafts_without_push, (_DRAFTS,)),
    "groups of workers in SGLang": Feature(
        lambda cfg: cfg.rollout.engine == "sglang" and cfg.rollout.data_parallel_size > 1,
        ("rollout.engine", "rollout.data_parallel_size"),
    ),
    "pushes of rollout.quantization": Feature(
        lambda cfg: cfg.rollout.quantization != "none" and cfg.train.replay is None,
        ("rollout.quantization",),
    ),
    "quantised drafts": Feature(
        lambda cfg: "quantization" in cfg.rollout.drafts, (f"{_DRAFTS}.quantization",)
    ),
    "rollout.max_staleness above 1": Feature(
        lambda cfg: cfg.rollout.max_staleness > 1, ("rollout.max_staleness",)
    ),
    "rollout.quantization or train.export_quantization": Feature(
        lambda cfg: {cfg.rollout.quantization, cfg.train.export_quantization} != {"none"}
    ),
    # Prompts, dialogues and rewards.
    "agent": Feature(lambda cfg: cfg.agent.is_used, _AGENT),
    "agent.tools": Feature(lambda cfg: cfg.agent.has_tools, ("agent.tools", "agent.mcp_servers")),
    "dialogues": Feature(lambda cfg: cfg.partner, ("environment.name", *_AGENT)),
    "environment": Feature(lambda cfg: cfg.environment.name is not None, ("environment.name",)),
    "eval.data or eval.sets": Feature(lambda cfg: cfg.eval.named_sets),
    "reward_model": Feature(_has_reward_model),
    "rewards in parts": Feature(
        lambda cfg: cfg.grpo.compares_parts,
        ("grpo.supervision", "grpo.multi_objective_aggregation"),
    ),
    "rewards of steps": Feature(
        lambda cfg: cfg.environment.name is not None or cfg.reward.process_model
    ),
    "several sets of prompts": Feature(
        lambda cfg: not isinstance(cfg.data.path, str), ("data.path",)
    ),
    "sources": Feature(lambda cfg: cfg.sources.by_name, ("sources.column",)),
    # Advantages and loss.
    "a KL term in the loss": Feature(lambda cfg: cfg.grpo.beta and not cfg.grpo.kl_in_reward),
    "a KL term in the reward": Feature(
        lambda cfg: cfg.grpo.beta and cfg.grpo.kl_in_reward, ("grpo.kl_in_reward",)
    ),
    "a grpo.loss_type that clips, such as dapo": Feature(lambda cfg: cfg.grpo.has_clip),
    "a grpo.loss_type that clips below, such as dapo": Feature(_clips_below),
    "advantages of another estimator than grpo": Feature(
        lambda cfg: cfg.grpo.advantage_estimator != "grpo", ("grpo.advantage_estimator",)
    ),
    "rollout weights of sequences": Feature(
        lambda cfg: not (cfg.grpo.rollout_importance_sampling_mode or "token").startswith("token"),
        ("grpo.rollout_importance_sampling_mode",),
    ),
    "whitened advantages": Feature(
        lambda cfg: cfg.grpo.advantage_estimator.startswith("reinforce"),
        ("grpo.advantage_estimator",),
    ),
}


def is_on(cfg: Config, name: str) -> bool:
    """Whether `cfg` has the feature on."""
    if name in FEATURES:
        return bool(FEATURES[name].is_on(cfg))
    if " with " in name:
        return all(is_on(cfg, part) for part in name.split(" with "))
    key, _, values = name.partition(": ")
    value, default = value_and_default(cfg, key)
    return as_yaml(value) in values.split(" or ") if values else bool(value) and value != default


def as_overrides(cfg: Config, name: str) -> str:
    """A feature that is on as overrides: `rollout.max_staleness=2`."""
    keys = keys_of(name)
    given = {key: value_and_default(cfg, key) for key in keys}
    shown = [
        f"{key}={as_yaml(to_jsonable_python(value))}"
        for key, (value, default) in given.items()
        if len(keys) == 1 or value != default
    ]
    return " with ".join(shown) or name


def keys_of(name: str) -> tuple[str, ...]:
    """The keys that turn a feature on."""
    if name in FEATURES:
        return FEATURES[name].keys
    if " with " in name:
        return tuple(key for part in name.split(" with ") for key in keys_of(part))
    return (name.partition(": ")[0],)


def value_and_default(cfg: Config, key: str) -> tuple[Any, Any]:
    """The value of a dotted key and its default: None in tables that are passed through."""
    *parents, name = key.split(".")
    table: Any = cfg
    for parent in parents:
        table = getattr(table, parent) if isinstance(table, Section) else _get(table, parent)
    if not isinstance(table, Section):
        return _get(table, name), None
    default = (
        type(table)
        .model_fields[name]
        .get_default(call_default_factory=True, validated_data=dict(table))
    )
    return getattr(table, name), default


def _get(table: Any, name: str) -> Any:
    return table.get(name) if isinstance(table, Mapping) else None
