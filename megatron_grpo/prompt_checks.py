"""Checks of data, rewards and environments before any rank starts."""

import re
from collections.abc import Sequence
from contextlib import ExitStack, closing
from math import isnan
from typing import TYPE_CHECKING, NamedTuple

import torch

from checkpoint_convert import ModelShape
from checkpoint_convert.tokenizer import load_tokenizer
from megatron_grpo.agents.agents import actor_pool, try_agent
from megatron_grpo.agents.fork_pool import ForkPool
from megatron_grpo.agents.rehearsal import rehearse
from megatron_grpo.agents.turns import ObservationTemplate, end_of_turn
from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.agent import AGENT
from megatron_grpo.config.config import Config
from megatron_grpo.config.eval import section_of
from megatron_grpo.config.file import with_num_steps
from megatron_grpo.config.reward import ENVIRONMENT, served_here
from megatron_grpo.data.images import check_images
from megatron_grpo.data.prompts import Prompt, end_tokens, load_prompts, with_date
from megatron_grpo.data.rows import Row
from megatron_grpo.data.samples import made_up
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.arguments import PLANNED, engine_number
from megatron_grpo.engines.reward_models import check_served
from megatron_grpo.evaluation.evaluation import as_evaluated, load_eval_prompts
from megatron_grpo.rewards.by_source import RewardsBySource, reference_faults
from megatron_grpo.rewards.functions import load_function
from megatron_grpo.rewards.pool import RewardPools, Trial
from megatron_grpo.rewards.scoring import SHORTENED
from parallel.microbatches import microbatch_capacity
from parallel.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Checked(NamedTuple):
    """A config that can start."""

    cfg: Config
    """With `train.num_epochs` converted to steps, and the date of the chat template."""
    prompt: str
    """For people: the first prompt as the model will see it, and sessions that were played."""
    trials: Sequence[Trial]
    """Completions of it, and their scores."""

    def __repr__(self) -> str:
        """Text of `megatron-grpo check`."""
        tried = what_was_tried(self.cfg, self.trials)
        return (
            f"{self.prompt}{trial_table(self.trials)}\nthe run in {self.cfg.train.run_dir} can "
            f"start: no mistakes in settings, model, folders, data{tried}"
        )


def check_prompts(cfg: Config, shape: ModelShape, *, rehearses: bool) -> Checked:
    """Raise ValueError if the prompts of `data` cannot be read, sampled, scored or trained on. With
    `rehearses`, an environment or agent of the run plays a session for people to look at."""
    check_images(cfg)
    with ExitStack() as stack:
        pools = stack.enter_context(closing(RewardPools()))
        # Started before the tokenizer: reward functions load in their own processes meanwhile.
        rewards = RewardsBySource(_without_served(cfg), pools)
        tokenizer = load_tokenizer(cfg.model.path)
        cfg = with_date(cfg, tokenizer)
        ends = end_tokens(shape, tokenizer, cfg.rollout)
        rewards.wait_loaded()  # a mistake in them should not wait for a large data set
        prompts = load_prompts(
            cfg, tokenizer, shape.max_position_embeddings, fault_of=reference_faults(cfg)
        )
        cfg = _with_steps_of_epochs(cfg, PromptStream.of(cfg, prompts))
        _check_sources(cfg, prompts)
        _check_vocabulary(shape, prompts)
        _check_context(cfg, shape)
        _check_engine_context(cfg, prompts, "data", "rollout")
        _check_token_budget(cfg, prompts)
        trials = rewards.try_out(prompts)
        _try_advantages(cfg, prompts)
        played = []
        for name, view in cfg.by_source.items():
            if pool := _dialogue_pool(view):
                stack.callback(pool.close)
                pool.wait_ready(_rows_of(name, view, prompts))
                first = next(each for each in prompts if each.source == name)
                if view.partner == AGENT:
                    try_agent(pool, view.agent, first)
                if rehearses:
                    played.append(rehearse(view, tokenizer, ends, first))
            _check_turns(view, tokenizer, ends)
        described = "\n".join([_described(prompts[0], tokenizer, ends, cfg), *played])
        return Checked(cfg, described, trials)


def _try_advantages(cfg: Config, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if the user's advantages fail on made-up completions of three prompts: with
    different rewards, with equal ones, and with a failed score among them."""
    function, size = AdvantageFunction.of(cfg), cfg.grpo.num_generations
    function.check_columns([prompt.row for prompt in prompts])
    groups = [prompts[i % len(prompts)] for i in range(3)]
    samples = [made_up(prompt, index, "") for prompt in groups for index in range(size)]
    rewards = torch.rand(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards[1], rewards[2, 0] = 1.0, torch.nan
    function(rewards.flatten(), torch.arange(3).repeat_interleave(size), samples)


def trial_table(trials: Sequence[Trial]) -> str:
    """Scores of trial completions, a line each; empty without reward functions."""
    if not any(trial.scores for trial in trials):
        return ""
    lines = ["\nrewards of trial completions:"]
    for text, scores, is_answer in trials:
        found = ", ".join(f"{name} {score:g}" for name, score in scores.items())
        lines.append(f"  {found}: {SHORTENED.repr(text)}{' (the answer)' if is_answer else ''}")
    return "\n".join(lines)


def what_was_tried(cfg: Config, trials: Sequence[Trial]) -> str:
    """Say whether rewards were tried and gave scores, and the agent was started."""
    scored = [trial for trial in trials if trial.scores]
    failed = [trial for trial in scored if any(map(isnan, trial.scores.values()))]
    unpaid = [each for each in scored if each.is_answer and max(each.scores.values()) <= 0]
    tried = "; rewards were tried" if scored else ""
    if failed:
        tried += f", and {len(failed)} of {len(scored)} trial completions have NO SCORE (see above)"
    elif unpaid:
        answer = SHORTENED.repr(unpaid[0].text)
        tried += f", and {answer} scores 0: does the reward know the right answer?"
    agents = [view.agent for view in cfg.by_source.values()]
    if any(agent.is_used and not agent.listen for agent in agents):
        tried += "; the agent was started"
    return tried


def check_reward_models(cfg: Config) -> None:
    """Raise ValueError for reward models that the config does not serve or ask correctly."""
    for function in served_here(cfg.rewards.values()):
        load_function(function)
    check_served(cfg)


def _without_served(cfg: Config) -> dict[str, Config]:
    """The run by source, with the functions that can be tried before reward models are served."""
    views = cfg.by_source
    for name, view in views.items():
        functions = tuple(each for each in view.reward.functions if not each.is_served_here)
        reward = view.reward.model_copy(update={"functions": functions})
        views[name] = view.model_copy(update={"reward": reward})
    return views


def _check_sources(cfg: Config, prompts: Sequence[Prompt]) -> None:
    found = {prompt.source for prompt in prompts}
    for name in cfg.sources.by_name:
        if name not in found:
            raise ValueError(
                f"sources.by_name.{name}: no row of data.path has this value in the column "
                f"{cfg.sources.column}, only {', '.join(sorted(found))}: correct the name, or "
                "leave it out"
            )


def _rows_of(source: str, cfg: Config, prompts: Sequence[Prompt]) -> list[Row]:
    """Rows that an environment must be able to begin with; none for an agent, which gets all
    columns."""
    return [] if cfg.partner == AGENT else [each.row for each in prompts if each.source == source]


def _with_steps_of_epochs(cfg: Config, stream: PromptStream) -> Config:
    if cfg.train.num_epochs is None:
        return cfg
    updates = BatchSchedule.of(cfg.grpo).updates_per_generation
    return with_num_steps(cfg, stream.num_generations(cfg.train.num_epochs) * updates)


def _described(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", ends: Sequence[int], cfg: Config
) -> str:
    ended = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ends)
    steps = counted(cfg.num_steps, "optimizer step")
    if cfg.sources.by_name:
        return f"{steps} on rows of {', '.join(cfg.sources.by_name)}"
    if _has_agent(cfg):
        return f"{steps}; an agent acts on each row of the data"
    if cfg.partner:
        most = cfg.rollout.max_completion_length
        return f"{steps} on sessions of at most {most} tokens after the prompt, turns up to {ended}"
    return (
        f"{steps}; row {prompt.index} of the data becomes "
        f"{len(prompt.token_ids)} tokens, which do not enter the loss:\n"
        f"{_short_text(prompt, tokenizer)}\n"
        f"and the model's, which do: at most {cfg.rollout.max_completion_length}, up to "
        f"{ended}"
    )


def _short_text(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The prompt as the model sees it, except that repeated image tokens are counted: `256
    <image>`."""
    text: str = tokenizer.decode(list(prompt.token_ids))
    if prompt.images is None:
        return text
    token: str = tokenizer.decode([prompt.images.reader.token_id])
    return re.sub(f"(?:{re.escape(token)})+", lambda run: f"{run[0].count(token)} {token}", text)


def check_evaluation(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError if the prompts of a held-out set cannot be read, sampled or scored."""
    check_images(cfg)
    tokenizer = load_tokenizer(cfg.model.path)
    ends = end_tokens(shape, tokenizer, cfg.rollout)
    with ExitStack() as stack:
        pools = stack.enter_context(closing(RewardPools()))
        dialogue_pools = {name: _dialogue_pool(view) for name, view in cfg.by_source.items()}
        for pool in dialogue_pools.values():
            if pool:
                stack.callback(pool.close)
        for name in cfg.eval.named_sets:
            view, section = as_evaluated(cfg, name), section_of(name)
            prompts = load_eval_prompts(view, name, tokenizer, shape.max_position_embeddings)
            _check_engine_context(view, prompts, f"{section}.data", section)
            try:
                _check_vocabulary(shape, prompts)
                RewardsBySource(_without_served(view), pools).try_out(prompts)
                for source, of_source in view.by_source.items():
                    if pool := dialogue_pools[source]:
                        pool.wait_ready(_rows_of(source, of_source, prompts))
                    _check_turns(of_source, tokenizer, ends)
            except ValueError as error:
                raise ValueError(f"{section}: {error}") from None


def _dialogue_pool(cfg: Config) -> ForkPool | None:
    """Pool of a run's environments or agents, if it has any."""
    if cfg.partner == AGENT:
        return None if cfg.agent.listen else actor_pool(cfg)
    return ForkPool(cfg.environment) if cfg.partner else None


def _check_turns(cfg: Config, tokenizer: "PreTrainedTokenizerBase", ends: Sequence[int]) -> None:
    if cfg.agent.has_tools and "tools" not in str(tokenizer.chat_template):
        raise ValueError(
            "agent.tools: the chat template of the model does not mention tools: use a model whose "
            "template does"
        )
    if cfg.partner == ENVIRONMENT:
        ObservationTemplate.from_config(
            cfg, tokenizer, ends
        )  # refuses more than _check_end_of_turn
    elif cfg.data.apply_chat_template:
        _check_end_of_turn(cfg, tokenizer, ends)


def _has_agent(cfg: Config) -> bool:
    return any(view.partner == AGENT for view in cfg.by_source.values())


def _longest_prompt(cfg: Config, prompts: list[Prompt]) -> int:
    """Tokens of the longest prompt; for an agent, which writes its own prompts, their limit."""
    if _has_agent(cfg):
        assert cfg.data.max_prompt_length is not None
        return cfg.data.max_prompt_length
    return max(len(prompt.token_ids) for prompt in prompts)


def _check_end_of_turn(
    cfg: Config, tokenizer: "PreTrainedTokenizerBase", ends: Sequence[int]
) -> None:
    """Refuse a chat template whose end of turn does not end a completion.

    Many base models have ChatML's template, whose turns end with <|im_end|>, but only <|endoftext|>
    as end token: a completion would continue with the user's next turn.
    """
    written = end_of_turn(cfg.data, tokenizer)
    if not written or set(written) & set(ends):
        return
    end = written[0]

    def named(token: int) -> str:
        return f"{tokenizer.convert_ids_to_tokens(token)} ({token})"

    raise ValueError(
        f"the chat template ends the model's turn with the token {named(end)}, and a completion "
        f"ends with {', '.join(map(named, ends))}, so it would not stop there: set "
        f"rollout.stop_token_ids={[*cfg.rollout.stop_token_ids, end]}, or "
        "data.apply_chat_template=false"
    )


def _check_vocabulary(shape: ModelShape, prompts: list[Prompt]) -> None:
    """Raise ValueError for token ids beyond the embedding, as from another model's tokenizer."""
    for prompt in prompts:
        if max(prompt.token_ids) >= shape.vocab_size:
            raise ValueError(
                f"prompt {prompt.index} has the token id {max(prompt.token_ids)}, and the model's "
                f"vocabulary ends at {shape.vocab_size - 1}: the tokenizer belongs to another model"
            )


def _check_context(cfg: Config, shape: ModelShape) -> None:
    """Refuse an agent's prompt and completion that may exceed the model's context."""
    if not _has_agent(cfg):
        return
    most, completion = cfg.data.max_prompt_length or 0, cfg.rollout.max_completion_length
    if most + completion > shape.max_position_embeddings:
        raise ValueError(
            f"data.max_prompt_length {most} and rollout.max_completion_length {completion} do not "
            f"fit into the model's context of {shape.max_position_embeddings} tokens: lower one of "
            "them"
        )


def _check_engine_context(cfg: Config, prompts: list[Prompt], data: str, rollout: str) -> None:
    """Refuse a longest prompt and completion that together exceed the engine's context.

    `data` and `rollout` name the config tables with the limits.
    """
    # vLLM would end such a completion early, as if it had reached its own limit, and refuse a
    # longer prompt only when a generation first draws it.
    names = PLANNED[cfg.rollout.engine]
    limit = engine_number(cfg.rollout, names.context)
    longest = _longest_prompt(cfg, prompts)
    length = longest + cfg.rollout.max_completion_length + names.spare_context
    if limit is not None and limit < length:
        raise ValueError(
            f"{data}: a prompt of {longest} tokens and {rollout}.max_completion_length "
            f"{cfg.rollout.max_completion_length} do not fit into "
            f"rollout.{cfg.rollout.engine}.{names.context} {limit}: set that to at least {length}, "
            f"or lower one of them ({data}.max_prompt_length)"
        )


def _check_token_budget(cfg: Config, prompts: list[Prompt]) -> None:
    """Refuse a longest prompt and completion that together exceed one microbatch."""
    longest = _longest_prompt(cfg, prompts)
    length = longest + cfg.rollout.max_completion_length
    alignment = cfg.alignment
    try:
        microbatch_capacity([length], cfg.train.max_tokens_per_microbatch, alignment)
    except ValueError as error:
        of = [f"prompt {each.index} has" for each in prompts if len(each.token_ids) == longest]
        who = "an agent's prompt may have" if _has_agent(cfg) else of[0]
        raise ValueError(
            f"{who} {longest} tokens and its completion up to "
            f"rollout.max_completion_length {cfg.rollout.max_completion_length}: {error}"
        ) from None
