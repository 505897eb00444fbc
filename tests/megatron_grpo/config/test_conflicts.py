"""Runs are refused for the pairs that `CONFLICTS` and `NEEDS` have, and for no other pair."""

import re
from itertools import combinations

import pytest

from checkpoint_convert.hf_config import has_other_towers
from helpers.models.published import write_config
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config import conflicts, file, needs
from megatron_grpo.config.checks import check_config
from megatron_grpo.config.config import Config
from megatron_grpo.config.conflicts import CONFLICTS
from megatron_grpo.config.features import is_on, keys_of
from megatron_grpo.config.file import load_config
from megatron_grpo.config.needs import NEEDS
from megatron_grpo.config.overrides import apply_override
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.data.images import check_images
from megatron_grpo.engines.support import check_drafts, check_towers_served
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.preflight import check_text_tower
from megatron_grpo.prompt_checks import check_reward_models
from pairs.features import (
    ADAPTERS,
    CORRECTED,
    DIALOGUE,
    EIGHT_BITS,
    IMAGES_OF_SGLANG,
    ROWS,
    SLEEPS,
    exclude,
    family_of,
    implied,
    overrides_of,
)

MTP = "rollout.vllm.speculative_config={method: mtp, num_speculative_tokens: 1"
OTHERS = {
    "grpo.kl_in_reward: true with grpo.beta": "grpo.beta=0.1 + grpo.kl_in_reward=true",
    "grpo.advantage_estimator other than grpo": "grpo.advantage_estimator=rloo",
    "agent.tools": "agent.tools=[python] + agent.weight=0 + data.max_prompt_length=64",
    "data.chat_template_kwargs": "data.chat_template_kwargs={enable_thinking: false}",
    "data.system_prompt": "data.system_prompt=Add.",
    "dialogues": DIALOGUE,
    "rollout.vllm.speculative_config.model": f"{MTP}, model: /other}}",
    "rollout.vllm.speculative_config.draft_tensor_parallel_size": f"{MTP}, "
    "draft_tensor_parallel_size: 1}",
    "model.mtp_num_layers of a drafter": f"model.mtp_num_layers=1 + {MTP}}}",
    "rollout.vllm.speculative_config without pushes": f"{MTP}}}",
    "eval.data or eval.sets": "eval.data={} + eval.pass_threshold=1.0",
    "rollout.data_parallel_size": "rollout.data_parallel_size=2",
    "grpo.delta": "grpo.delta=3.0",
    "grpo.advantage_estimator of a file": "grpo.advantage_estimator=mine.py:centered",
    "grpo.kl_target": "grpo.kl_target=0.1",
    "grpo.loss_arguments": "grpo.loss_arguments={tau: 1.0}",
    "grpo.overlong_filter": "grpo.overlong_filter=true",
    "grpo.rollout_importance_sampling_mode": CORRECTED,
    "grpo.rollout_rs": "grpo.rollout_rs=token",
    "grpo.use_bias_correction_kl": "grpo.use_bias_correction_kl=true",
    "lora.adapter_path": "lora.adapter_path=folder",
    "lora.r": ADAPTERS,
    "model.megatron.cp_comm_type": "model.megatron.cp_comm_type=a2a",
    "model.megatron.fp8": "model.megatron.fp8=e4m3",
    "model.megatron.moe_aux_loss_coeff": "model.megatron.moe_aux_loss_coeff=0.1",
    "model.megatron.moe_z_loss_coeff": "model.megatron.moe_z_loss_coeff=0.1",
    "parallel.num_layers_in_first_pipeline_stage": "parallel.num_layers_in_first_pipeline_stage=1",
    "parallel.num_layers_in_last_pipeline_stage": "parallel.num_layers_in_last_pipeline_stage=1",
    "rollout.quantization of pushes": EIGHT_BITS,
    "rollout.vllm.speculative_config.quantization": f"{MTP}, quantization: fp8}}",
    "reward.clip_range": "reward.clip_range=[-1, 1]",
    "rewards in parts": "grpo.multi_objective_aggregation=normalize_then_sum",
    "rollout.max_staleness above 1": f"rollout.max_staleness=2 + {CORRECTED}",
    "rollout.python": "rollout.python=python",
    "rollout.quantization_ignore": "rollout.quantization_ignore=[lm_head]",
    "rollout.sglang": "rollout.sglang.mem_fraction_static=0.5",
    "rollout.sglang.limit_mm_data_per_request": IMAGES_OF_SGLANG,
    "rollout.tensor_parallel_size": "rollout.tensor_parallel_size=2",
    "rollout.vllm": "rollout.vllm.max_model_len=64",
    "data.path with several sets": "data.path=[{path: a, weight: 1}]",
    "train.num_epochs": "train.num_epochs=1 + train.num_steps=null",
    "train.offload": f"{SLEEPS} + train.offload=optimizer",
    "train.offload of weights": f"{SLEEPS} + train.offload=[weights]",
    "train.offload of the reference by name": f"{SLEEPS} + train.offload=[reference]",
}
"""Overrides that turn on further features of the tables."""
WITHOUT = {
    "grpo.kl_in_reward: false with grpo.beta": ["grpo.beta=0"],
    "a correction for older weights": ["grpo.rollout_importance_sampling_mode=null"],
    "data.apply_chat_template: true": ["data.apply_chat_template=false"],
    "data.image_column": ["data.image_column=null"],
    "data.max_prompt_length": ["data.max_prompt_length=null"],
    "grpo.beta": ["grpo.beta=0"],
    "lora.r": ["lora.r=0"],
    "parallel.overlap_grad_reduce: true": ["parallel.overlap_grad_reduce=false"],
    "parallel.context_parallel_size": ["parallel.context_parallel_size=1"],
    "parallel.pipeline_parallel_size": ["parallel.pipeline_parallel_size=1"],
    "parallel.tensor_parallel_size": ["parallel.tensor_parallel_size=1"],
    "rewards of steps": ["environment.name=null"],
    "rollout.enable_sleep_mode: true": ["rollout.enable_sleep_mode=false"],
    "rollout.engine: sglang": ["rollout.engine=vllm"],
    "rollout.in_flight_updates: true": ["rollout.in_flight_updates=false"],
    "rollout.max_staleness": ["rollout.max_staleness=0"],
    "rollout.quantization": ["rollout.quantization=none"],
    "train.offload of weights": ["train.offload=none"],
}
"""Overrides that turn off a required feature, where the example or the config turns it on."""
PUBLISHED = {
    "deepseek_v32": "DeepSeek-V3.2",
    "glm4_moe": "GLM-4.5-Air",
    "qwen3": "Qwen3-32B",
    "qwen3_moe": "Qwen3-30B-A3B",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
}
"""A published model of each family of the features."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family, name in PUBLISHED.items():
        write_config(folder / family, name)
    return folder


def overrides(models, *features: str) -> list[str]:
    model = f"model.path={models / family_of(*features)}"
    return ["model.dtype=bfloat16", model, *overrides_of(*features)]


def refusal(models, *features: str) -> str:
    """Why the checks before a run refuse these features together; empty if they do not."""
    try:
        cfg = load_config(TINY_CONFIG, overrides(models, *features))
        shape = trained_shape(cfg)
        check_drafts(cfg, shape)
        check_images(cfg)
        check_towers_served(cfg.model, cfg.rollout)
        check_reward_models(cfg)
        if has_other_towers(cfg.model.path):
            check_text_tower(cfg)
        else:
            check_adapters(cfg.lora, shape)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("feature", ROWS)
def test_a_feature_alone_is_accepted_with_all_that_it_implies(models, feature):
    assert refusal(models, feature) == ""
    cfg = load_config(TINY_CONFIG, overrides(models, feature))
    assert [each for each in implied(feature) if not is_on(cfg, each)] == []


def test_exactly_the_pairs_of_the_table_are_refused(models):
    pairs = combinations(ROWS, 2)
    wrong = [pair for pair in pairs if bool(refusal(models, *pair)) != exclude(*pair)]
    assert wrong == []


def keys(feature: str) -> list[str]:
    """Overrides that turn a feature on: as listed, or as its name says."""
    if feature in ROWS:
        return overrides_of(feature)
    if feature in OTHERS:
        return OTHERS[feature].split(" + ")
    if " with " in feature:
        return [key for part in feature.split(" with ") for key in keys(part)]
    key, _, values = feature.partition(": ")
    return [f"{key}={values.partition(' or ')[0] or 'true'}"]


@pytest.fixture
def unchecked(monkeypatch):
    """Load a config whose sections have been checked one by one, without checks between them."""

    def load(*overrides: str) -> Config:
        with monkeypatch.context() as patch:
            patch.setattr(file, "mistakes_in", lambda cfg: ())
            return load_config(TINY_CONFIG, ["model.dtype=bfloat16", *overrides])

    return load


def have(cfg: Config, remedy: str, *features: str) -> bool:
    """Whether the config with the overrides of a remedy has all the features."""
    table = cfg.model_dump(exclude_unset=True)
    for override in remedy.split(" and "):
        apply_override(table, override, Config)
    if remedy == "train.num_epochs=null":
        table["train"]["num_steps"] = 1  # of which only the user knows the number
    other = Config.model_validate(table)
    return all(is_on(other, each) for each in features)


@pytest.mark.parametrize("pair", CONFLICTS, ids=" + ".join)
def test_a_pair_is_refused_with_both_keys_the_reason_and_what_to_do(pair, unchecked, monkeypatch):
    cfg = unchecked(*(key for feature in reversed(pair) for key in keys(feature)))
    assert [is_on(cfg, feature) for feature in pair] == [True, True]
    with pytest.raises(ValueError):
        check_config(cfg)
    monkeypatch.setattr(conflicts, "CONFLICTS", {pair: CONFLICTS[pair]})
    [refused] = conflicts.conflicts(cfg)
    assert re.search(r" does not go with .*: .*; [a-z]", str(refused))
    for feature in pair:
        names = keys_of(feature) or (feature,)
        assert any(name in str(refused) for name in names)
    for remedy in refused.remedies:
        assert not have(cfg, remedy, *pair), remedy
    assert refused.remedies


@pytest.mark.parametrize("pair", NEEDS, ids=" + ".join)
def test_a_feature_is_refused_without_what_it_needs(pair, unchecked, monkeypatch):
    feature, needed = pair
    cfg = unchecked(*keys(feature), *WITHOUT.get(needed, ()))
    assert (is_on(cfg, feature), is_on(cfg, needed)) == (True, False)
    monkeypatch.setattr(needs, "NEEDS", {pair: NEEDS[pair]})
    monkeypatch.setattr(needs, "IDLE", {})
    [refused] = needs.unmet_needs(cfg)
    assert re.search(r" needs .*: .*; [a-z]", str(refused))
    assert keys_of(feature)[0] in str(refused)
    for remedy in refused.remedies:
        assert have(cfg, remedy, needed) or not have(cfg, remedy, feature), remedy
    assert refused.remedies
