"""Features of a run by the names of docs/compatibility.md, and whether a config has them on.

A name begins with the key that turns the feature on. `KEY` is on with a value that is neither empty
nor the default, `KEY: VALUE` or `KEY: VALUE or VALUE` with that value, and `A with B` with both.
`FEATURES` has the features that depend on more than one key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import parts_moved
from megatron_grpo.config.reward import REWARD_MODEL
from megatron_grpo.config.section import Section, as_yaml


def _names_reference(cfg: Config) -> bool:
    return cfg.train.offload != "all" and "reference" in parts_moved(cfg.train.offload)


def _trains_drafter(cfg: Config) -> bool:
    return bool(cfg.model.mtp_num_layers) and cfg.rollout.drafts_with_mtp


def _drafts_without_pushes(cfg: Config) -> bool:
    """Whether engines draft with weights that pushes do not update."""
    method = cfg.rollout.drafts.get("method")
    return method not in (None, "ngram", "ngram_gpu", "suffix") and not _trains_drafter(cfg)


def _has_reward_model(cfg: Config) -> bool:
    functions = (each for reward in cfg.rewards.values() for each in reward.functions)
    return any(function.name == REWARD_MODEL for function in functions)


def _corrects(cfg: Config) -> bool:
    weighs = cfg.grpo.rollout_importance_sampling_mode is not None
    return weighs or cfg.grpo.old_logprobs == "rollout"


FEATURES: dict[str, Callable[[Config], object]] = {
    "a correction for older weights": _corrects,
    "a grpo.loss_type of a file": lambda cfg: "loss_type" in cfg.grpo.own_functions,
    "a grpo.loss_type that clips below, such as dapo": lambda cfg: cfg.grpo.takes("epsilon"),
    "a grpo.loss_type that clips, such as dapo": lambda cfg: cfg.grpo.takes("epsilon_high"),
    "agent": lambda cfg: cfg.agent.is_used,
    "agent.tools": lambda cfg: cfg.agent.has_tools,
    "data.path with several sets": lambda cfg: not isinstance(cfg.data.path, str),
    "dialogues": lambda cfg: cfg.partner,
    "environment": lambda cfg: cfg.environment.name is not None,
    "eval.data or eval.sets": lambda cfg: cfg.eval.named_sets,
    "grpo.advantage_estimator of a file": lambda cfg: (
        "advantage_estimator" in cfg.grpo.own_functions
    ),
    "grpo.advantage_estimator other than grpo": lambda cfg: cfg.grpo.advantage_estimator != "grpo",
    "grpo.loss_aggregation: constant": lambda cfg: cfg.grpo.aggregation == "constant",
    # A replay starts no engines, so nothing is pushed.
    "lora.sync: adapter": lambda cfg: cfg.lora.is_served and cfg.train.replay is None,
    "model.mtp_num_layers of a drafter": _trains_drafter,
    "reward_model": _has_reward_model,
    "rewards in parts": lambda cfg: cfg.grpo.compares_parts,
    "rewards of steps": lambda cfg: cfg.environment.name or cfg.reward.process_model,
    "rollout.max_staleness above 1": lambda cfg: cfg.rollout.max_staleness > 1,
    "rollout.quantization of pushes": lambda cfg: (
        cfg.rollout.quantization != "none" and cfg.train.replay is None
    ),
    "rollout.quantization or train.export_quantization": lambda cfg: (
        {cfg.rollout.quantization, cfg.train.export_quantization} != {"none"}
    ),
    "rollout.vllm.speculative_config.model": lambda cfg: (
        cfg.rollout.drafts.get("model") not in (None, str(cfg.model.path))
    ),
    "rollout.vllm.speculative_config without pushes": _drafts_without_pushes,
    "sources": lambda cfg: cfg.sources.by_name,
    "train.offload": lambda cfg: parts_moved(cfg.train.offload),
    "train.offload of the reference by name": _names_reference,
    "train.offload of weights": lambda cfg: "weights" in parts_moved(cfg.train.offload),
}

_AGENT = ("agent.command", "agent.function", "agent.tools", "agent.mcp_servers", "agent.listen")
_KEYS = {
    "agent": _AGENT,
    "agent.tools": ("agent.tools", "agent.mcp_servers"),
    "dialogues": ("environment.name", *_AGENT),
    "environment": ("environment.name",),
    "eval.data or eval.sets": (),
    "reward_model": (),
    "rewards in parts": ("grpo.supervision", "grpo.multi_objective_aggregation"),
    "sources": ("sources.column",),
}
"""Keys of features whose names do not begin with a key."""

_SECTIONS = {"eval.data or eval.sets": "eval", "sources": "sources"}
"""Features that are off only with all of a section."""


def is_on(cfg: Config, name: str) -> bool:
    if name in FEATURES:
        return bool(FEATURES[name](cfg))
    if " with " in name:
        return all(is_on(cfg, part) for part in name.split(" with "))
    key, _, values = name.partition(": ")
    value = value_of(cfg, key)
    if values:
        return as_yaml(value) in values.split(" or ")
    return bool(value) and value != default_of(cfg, key)


def keys_of(name: str) -> tuple[str, ...]:
    """The keys that turn a feature on."""
    if name in _KEYS:
        return _KEYS[name]
    if name not in FEATURES and " with " in name:
        return tuple(key for part in name.split(" with ") for key in keys_of(part))
    return (name.split(" ")[0].removesuffix(":"),)


def as_overrides(cfg: Config, name: str) -> str:
    """Format a feature that is on as overrides: `rollout.max_staleness=2`."""
    keys = keys_of(name)
    given = [key for key in keys if len(keys) == 1 or value_of(cfg, key) != default_of(cfg, key)]
    shown = [f"{key}={as_yaml(to_jsonable_python(value_of(cfg, key)))}" for key in given]
    return " with ".join(shown) or name


def without(cfg: Config, name: str) -> list[str]:
    """Overrides that turn a feature off, for each of its parts."""
    if name in _SECTIONS:
        return [f"{_SECTIONS[name]}={{}}"]
    parts = [name] if name in FEATURES else name.split(" with ")
    return [each for part in parts if (each := " and ".join(_defaults(cfg, keys_of(part))))]


def _defaults(cfg: Config, keys: Sequence[str]) -> Iterator[str]:
    """Overrides that give `keys` their defaults; none for required keys."""
    for key in keys:
        default = default_of(cfg, key)
        if default is not PydanticUndefined and value_of(cfg, key) != default:
            yield f"{key}={as_yaml(to_jsonable_python(default))}"


def value_of(cfg: Config, key: str) -> Any:
    """Value of a dotted key; None for a missing key of a pass-through table."""
    table: Any = cfg
    for name in key.split("."):
        if isinstance(table, Section):
            table = getattr(table, name)
        else:
            table = table.get(name) if isinstance(table, Mapping) else None
    return table


def default_of(cfg: Config, key: str) -> Any:
    """Default of a dotted key, which may depend on other keys; None in pass-through tables."""
    section, _, name = key.rpartition(".")
    table = value_of(cfg, section)
    if not isinstance(table, Section):
        return None
    field = type(table).model_fields[name]
    return field.get_default(call_default_factory=True, validated_data=dict(table))
