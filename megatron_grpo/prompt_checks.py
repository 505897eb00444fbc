"""Checks of data, rewards and environments before any rank starts."""

from contextlib import ExitStack, closing

from checkpoint_convert import ModelShape
from checkpoint_convert.tokenizer import load_tokenizer
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt, PromptStream, end_tokens, load_prompts
from megatron_grpo.environments import EnvironmentPool
from megatron_grpo.evaluation.evaluation import as_evaluated, load_eval_prompts
from megatron_grpo.experience.batching import BatchSchedule
from megatron_grpo.rewards import RewardPool
from megatron_grpo.rewards.references import reference_fault
from megatron_grpo.rollout.turns import Turns
from megatron_grpo.rollout.vllm_command import engine_number
from parallel.alignment import Alignment
from parallel.microbatches import plan_microbatches


def check_prompts(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError if the prompts of `data` cannot be read, sampled, scored or trained on."""
    with ExitStack() as stack:
        rewards = stack.enter_context(closing(RewardPool(cfg.reward)))
        tokenizer = load_tokenizer(cfg.model.path)
        ends = end_tokens(shape, tokenizer, cfg.rollout)
        prompts = load_prompts(
            cfg, tokenizer, shape.max_position_embeddings, fault_of=reference_fault(cfg.reward)
        )
        num_prompts = BatchSchedule.of(cfg.grpo).num_prompts
        PromptStream(prompts, num_prompts, cfg.train.seed, cfg.data.shuffle)
        _check_vocabulary(shape, prompts)
        _check_engine_context(cfg, prompts, "data", "rollout")
        _check_token_budget(cfg, prompts)
        rows = [prompt.row for prompt in prompts]
        rewards.wait_ready(rows)
        if cfg.environment.name is not None:
            Turns.of(cfg, tokenizer, ends)
            environments = EnvironmentPool(cfg.environment)
            stack.callback(environments.close)
            environments.wait_ready(rows)


def check_evaluation(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError if the prompts of `eval` cannot be read, sampled or scored."""
    view = as_evaluated(cfg)
    tokenizer = load_tokenizer(cfg.model.path)
    end_tokens(shape, tokenizer, cfg.rollout)
    prompts = load_eval_prompts(view, tokenizer, shape.max_position_embeddings)
    _check_vocabulary(shape, prompts)
    _check_engine_context(view, prompts, "eval.data", "eval")
    with closing(RewardPool(view.reward)) as rewards:
        rewards.wait_ready([prompt.row for prompt in prompts])


def _check_vocabulary(shape: ModelShape, prompts: list[Prompt]) -> None:
    """Raise ValueError for token ids beyond the embedding, as from another model's tokenizer."""
    for prompt in prompts:
        if max(prompt.token_ids) >= shape.vocab_size:
            raise ValueError(
                f"prompt {prompt.index} has the token id {max(prompt.token_ids)}, and the model's "
                f"vocabulary ends at {shape.vocab_size - 1}: the tokenizer belongs to another model"
            )


def _check_engine_context(cfg: Config, prompts: list[Prompt], data: str, rollout: str) -> None:
    """The longest prompt with the longest completion must fit into vLLM's `max_model_len`.

    vLLM would end completions there, which would look as if they had reached their own limit; and
    it would refuse a longer prompt only when a generation first draws it. `data` and `rollout` name
    the config tables that have the limits.
    """
    limit = engine_number(cfg.rollout.vllm, "max_model_len")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    length = longest + cfg.rollout.max_completion_length
    if limit is not None and limit < length:
        raise ValueError(
            f"{data}: a prompt of {longest} tokens and {rollout}.max_completion_length "
            f"{cfg.rollout.max_completion_length} do not fit into rollout.vllm.max_model_len "
            f"{limit}: set that to at least {length}, or lower one of them "
            f"({data}.max_prompt_length)"
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
