"""Everything that can be refused before a rank starts: sizes, weights, data, rewards, engines."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import httpx
import torch
import yaml

from checkpoint_convert import (
    ModelShape,
    check_divisible,
    check_weights,
    read_shape,
)
from checkpoint_convert.tokenizer import load_tokenizer
from checkpoint_convert.vllm import check_engine_dims
from megatron_grpo.batching import BatchSchedule
from megatron_grpo.checkpoints.folders import latest_step
from megatron_grpo.config import Config, RolloutConfig
from megatron_grpo.config_file import dump_config, load_config
from megatron_grpo.environments import EnvironmentPool
from megatron_grpo.evaluation import as_evaluated, load_eval_prompts
from megatron_grpo.job_token import TOKEN_VARIABLE, bearer, check_token
from megatron_grpo.prompts import Prompt, PromptStream, end_tokens, load_prompts
from megatron_grpo.rewards import RewardPool
from megatron_grpo.rollout import check_engine_arguments
from megatron_grpo.transformer import transformer_config
from megatron_grpo.turns import Turns
from megatron_grpo.weight_sums import engine_dims
from parallel.microbatches import plan_microbatches
from parallel.packing import Alignment

HEALTH_TIMEOUT_SECONDS = 5.0

# What a run may change when it is resumed: how long, how fast and where, but not what is learnt.
CHANGEABLE = (
    "train.run_dir",
    "train.num_steps",
    "train.max_tokens_per_microbatch",
    "train.save_interval",
    "train.export_interval",
    "train.keep_checkpoints",
    "train.hang_timeout",
    "train.max_skipped_steps",
    "parallel.",
    "rollout.engine",
    "rollout.base_urls",
    "rollout.num_engines",
    "rollout.tensor_parallel_size",
    "rollout.startup_timeout",
    "rollout.request_timeout",
    "rollout.health_timeout",
    "rollout.stall_timeout",
    "rollout.vllm",
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
)


def preflight(cfg: Config, token: str | None) -> None:
    """Raise ValueError, with the numbers and a legal value, when `cfg` cannot run on this machine.

    Takes seconds: reads headers and not weights, tokenizes the data, loads the reward functions in
    their own process, and asks the engines that were given by address for their health, and whether
    they take `token`.
    """
    schedule = BatchSchedule.of(cfg.grpo)
    shape = _check_model(cfg)
    check_engines(cfg.rollout, shape, token)
    check_same_run(cfg)
    if cfg.wandb.project and importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb.project needs wandb: install the extra `wandb`, or leave it out")
    with ExitStack() as stack:
        rewards = stack.enter_context(closing(RewardPool(cfg.reward)))
        tokenizer = load_tokenizer(cfg.model.path)
        ends = end_tokens(shape, tokenizer)
        prompts = load_prompts(cfg, tokenizer, shape.max_position_embeddings)
        PromptStream(prompts, schedule.num_prompts, cfg.train.seed, cfg.data.shuffle)
        _check_vocabulary(shape, prompts)
        _check_token_budget(cfg, prompts)
        rows = [prompt.row for prompt in prompts]
        rewards.wait_ready(rows)
        if cfg.environment.name is not None:
            Turns.of(cfg, tokenizer, ends)
            environments = EnvironmentPool(cfg.environment)
            stack.callback(environments.close)
            environments.wait_ready(rows)
    if cfg.eval.data is not None:
        check_evaluation(cfg, shape)


def check_evaluation(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError when the prompts of `eval` cannot be used, served or scored."""
    view = as_evaluated(cfg)
    tokenizer = load_tokenizer(cfg.model.path)
    end_tokens(shape, tokenizer)
    prompts = load_eval_prompts(view, tokenizer, shape.max_position_embeddings)
    _check_vocabulary(shape, prompts)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    limit = cfg.rollout.vllm.get("max_model_len")
    if limit is not None and longest + view.rollout.max_completion_length > limit:
        raise ValueError(
            f"eval: a prompt of {longest} tokens and eval.max_completion_length "
            f"{view.rollout.max_completion_length} are more than rollout.vllm.max_model_len "
            f"{limit}: raise that, or lower one of them (eval.data.max_prompt_length)"
        )
    with closing(RewardPool(view.reward)) as rewards:
        rewards.wait_ready([prompt.row for prompt in prompts])


def check_engines(rollout: RolloutConfig, shape: ModelShape, token: str | None) -> None:
    """Raise ValueError when the engines cannot split the model, be started, reached or used."""
    check_engine_dims(shape, engine_dims(rollout))
    for url in rollout.base_urls:
        _check_answers(url.rstrip("/"), check_token(token))
    if rollout.engine == "vllm" and not rollout.base_urls:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "rollout.engine vllm is not installed: install the extra `cpu` or `gpu`, or set "
                "rollout.engine=transformers"
            )
        check_engine_arguments(rollout.vllm)


def check_same_run(cfg: Config) -> None:
    """Raise ValueError when `train.run_dir` holds another run than `cfg` describes.

    Lists every key that differs, apart from those that a resumed run may change.
    """
    saved = cfg.train.run_dir / "config.yaml"
    if latest_step(cfg.train.run_dir / "checkpoints") == 0:
        return  # nothing has been learnt yet that another config could spoil
    # Read as a config: keys that are newer than the run have their defaults, as they had in effect.
    before = dict(_flatten(yaml.safe_load(dump_config(load_config(saved)))))
    now = dict(_flatten(yaml.safe_load(dump_config(cfg))))
    differing = [
        f"{key}: {before.get(key, 'not there')} before, {now.get(key, 'not there')} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(CHANGEABLE)
    ]
    if differing:
        raise ValueError(
            f"train.run_dir {cfg.train.run_dir} holds a run of another config: choose another "
            "folder, or remove this one.\n  " + "\n  ".join(differing)
        )


def _check_model(cfg: Config) -> ModelShape:
    folder = cfg.model.path
    if not folder.is_dir():
        raise ValueError(f"model.path {folder} is not a folder: give a downloaded model")
    shape = read_shape(folder)
    check_divisible(shape, cfg.dims)
    check_weights(folder, shape)
    transformer_config(
        shape,
        cfg.dims,
        dtype=getattr(torch, cfg.model.dtype),
        sequence_parallel=cfg.parallel.sequence_parallel,
        overrides=cfg.model.megatron,
    )
    return shape


def _check_vocabulary(shape: ModelShape, prompts: list[Prompt]) -> None:
    """A tokenizer of another model would index past the embedding."""
    for prompt in prompts:
        if max(prompt.token_ids) >= shape.vocab_size:
            raise ValueError(
                f"prompt {prompt.index} has the token id {max(prompt.token_ids)}, and the model's "
                f"vocabulary ends at {shape.vocab_size - 1}: the tokenizer is another model's"
            )


def _check_token_budget(cfg: Config, prompts: list[Prompt]) -> None:
    """The longest prompt with the longest completion must fit into one microbatch."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    length = len(longest.token_ids) + cfg.rollout.max_completion_length
    alignment = Alignment.of(cfg.dims, cfg.parallel.sequence_parallel)
    try:
        plan_microbatches([length], cfg.train.max_tokens_per_microbatch, cfg.dims, alignment)
    except ValueError as error:
        raise ValueError(
            f"prompt {longest.index} has {len(longest.token_ids)} tokens and its completion up to "
            f"rollout.max_completion_length {cfg.rollout.max_completion_length}: {error}"
        ) from None


def _check_answers(url: str, token: str) -> None:
    try:
        # trust_env: a proxy of the environment is not for engines.
        with httpx.Client(base_url=url, timeout=HEALTH_TIMEOUT_SECONDS, trust_env=False) as engine:
            engine.get("/health").raise_for_status()
            # Any route would do that wants the token and changes nothing.
            response = engine.get("/load", headers=bearer(token))
            if response.status_code == httpx.codes.UNAUTHORIZED:
                raise ValueError(
                    f"rollout engine {url} refuses the token in {TOKEN_VARIABLE}: give the one "
                    "that the engine was started with"
                )
            response.raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(
            f"rollout engine {url} is not healthy ({error}): start it, or correct rollout.base_urls"
        ) from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
