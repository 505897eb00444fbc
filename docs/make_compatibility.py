"""Writes the table of docs/compatibility.md: features of a run that exclude each other.

    PYTHONPATH=. python docs/make_compatibility.py

A row has the conflicts of a feature, of the features that it needs, and of its kinds.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from megatron_grpo.config.conflicts import CONFLICTS
from megatron_grpo.config.needs import NEEDS

PAGE = Path(__file__).with_name("compatibility.md")
BEGIN = "| feature | refused with |\n|---|---|\n"

FEATURES: dict[str, tuple[str, ...]] = {
    "lora.sync: adapter": ("lora.r",),
    "lora.sync: merged": ("lora.r",),
    "rollout.max_staleness": (),
    "rollout.in_flight_updates": (),
    "rollout.over_sampling": (),
    "rollout.recompute_kv_cache: false": (),
    "rollout.enable_sleep_mode": (),
    "train.offload: all": ("train.offload", "train.offload of weights"),
    "train.offload: optimizer": ("train.offload",),
    "rollout.engine: sglang": (),
    "rollout.quantization": (),
    "rollout.quantization_aware": ("rollout.quantization",),
    "train.export_quantization": (),
    "rollout.weight_transport: disk": (),
    "rollout.router_replay": (),
    "rollout.indexer_replay": (),
    "rollout.vllm.speculative_config": ("rollout.vllm",),
    "model.mtp_num_layers": (),
    "data.image_column": (),
    "model.freeze_vision: false": (),
    "environment": ("dialogues",),
    "agent": ("dialogues",),
    "sources": (),
    "reward_model": (),
    "grpo.shared_prompts": (),
    "grpo.dynamic_sample": (),
    "grpo.dynamic_sample_temperature": ("grpo.dynamic_sample",),
    "environment with grpo.supervision: process": ("environment", "rewards in parts"),
    "grpo.sync_ref_model": (),
    "train.replay": (),
    "train.init_from": (),
    "optimizer.optimizer: muon": (),
    "optimizer.optimizer_cpu_offload": (),
    "parallel.dynamic_context_parallel": (),
    "parallel.overlap_param_gather": (),
}
"""Features in the order of the page, each with those that it is a kind of."""


def implied(feature: str) -> Iterator[str]:
    """Features of every run with this one: its kinds, its needs, and whatever these imply."""
    yield feature
    needed = [other.removesuffix(": true") for (each, other) in NEEDS if each == feature]
    for other in (*FEATURES.get(feature, ()), *needed):
        yield from implied(other)


def exclude(feature: str, other: str) -> bool:
    """Whether a run can have only one of two features."""
    pairs = product(implied(feature), implied(other))
    return any((a, b) in CONFLICTS or (b, a) in CONFLICTS for a, b in pairs)


def shortened(features: list[str]) -> list[str]:
    """The features without those that imply another one, and with a kind in place of its members.

    With `rollout.quantization` refused, so is `rollout.quantization_aware`, a kind of it.
    """
    names = [name for name in features if not {*implied(name)} & {*features} - {name}]
    for kind in ("lora.r", "train.offload"):
        members = [name for name, kinds in FEATURES.items() if kind in kinds]
        if {*members} <= {*names}:
            names[names.index(members[0])] = kind
            names = [name for name in names if name not in members]
    return names


def table() -> str:
    """A row for each feature that excludes others."""
    excluded = {
        feature: shortened([other for other in FEATURES if exclude(feature, other)])
        for feature in FEATURES
    }
    rows = [f"| `{name}` | `{'`, `'.join(all_)}` |\n" for name, all_ in excluded.items() if all_]
    return BEGIN + "".join(rows)


def page() -> str:
    """The text of docs/compatibility.md, with the table of the present conflicts."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
