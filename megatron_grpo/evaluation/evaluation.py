"""Evaluation of held-out sets: sampled with their own settings, scored, summarised as pass@k."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from checkpoint_convert import ModelShape
from megatron_grpo.agents.partners import Partners
from megatron_grpo.batch.experience import completion_metrics, dialogue_metrics
from megatron_grpo.config.config import Config
from megatron_grpo.config.eval import EvalSet, metric_prefix, section_of
from megatron_grpo.data.prompts import Prompt, end_tokens, load_prompts
from megatron_grpo.data.samples import Sample, columns_by_prompt, sample_row
from megatron_grpo.engines.group import Group, features_of, print_failures, sample_alone
from megatron_grpo.engines.request import SamplingParams
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.rewards.by_source import RewardsBySource, reference_faults
from megatron_grpo.rewards.pool import RewardPools
from megatron_grpo.rewards.scoring import RewardError, check_failed
from megatron_grpo.timing import PhaseTimer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples, c of them passed.

    Equation 1 of arXiv 2107.03374: the share of subsets of k samples with at least one that passed.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    n, c = num_samples, num_passed
    assert 0 <= c <= n and 1 <= k <= n, f"pass@{k} of {c} passed of {n}"
    # A product of factors of at most 1: binomials of hundreds overflow a float. There are min(c, k)
    # factors, since C(n - c, k) / C(n, k) = C(n - k, c) / C(n, c).
    few, many = sorted((c, k))
    failed = 1.0
    for i in range(few):
        failed *= max(n - many - i, 0) / (n - i)
    return 1.0 - failed


SERIES_OF_EVALUATION = -1
"""Number of the generation in seeds: all evaluations sample alike, and with no seed of training."""

ROUNDING = 1e-9
"""Tolerance of `eval.pass_threshold`: 0.7 + 0.2 + 0.1 is below 1 in floating point."""


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation: parallel lists, with samples of one prompt adjacent. A failed score
    is NaN, and so is the total of its completion."""

    samples: list[Sample]
    rewards: list[dict[str, float]]
    totals: list[float]


def as_evaluated(cfg: Config, name: str = "") -> Config:
    """View of `cfg` for the held-out set `name`: its data, rewards, sampling and `eval`."""
    own, rollout = cfg.eval.named_sets[name], cfg.rollout
    assert own.data is not None, "it has prompts"
    sampling: dict[str, Any] = {"top_p": own.top_p, "top_k": own.top_k}
    if own.temperature is not None:
        sampling["temperature"] = own.temperature
    if own.max_completion_length is not None:
        sampling["max_completion_length"] = own.max_completion_length
    return cfg.model_copy(
        update={
            "data": own.data.model_copy(update={"date": own.data.date or cfg.data.date}),
            "reward": own.reward or cfg.reward,
            "sources": cfg.sources.scored_by(own.reward),
            "rollout": rollout.model_copy(update=sampling),
            "eval": cfg.eval.model_copy(update={**dict(own), "sets": {}}),
        }
    )


def load_eval_prompts(
    view: Config,
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    max_position_embeddings: int,
    *,
    warns: bool = True,
) -> list[Prompt]:
    """Prompts of the held-out set `name`; `view` is `as_evaluated(cfg, name)`."""
    try:
        fault_of = reference_faults(view)
        prompts = load_prompts(
            view,
            tokenizer,
            max_position_embeddings,
            fault_of=fault_of,
            limit="max_completion_length",
            warns=warns,
        )
    except ValueError as error:
        raise ValueError(f"{section_of(name)}: {error}") from None
    return prompts[: view.eval.max_prompts]


def due_steps(cfg: Config) -> frozenset[int]:
    if not cfg.eval.named_sets:
        return frozenset()
    return frozenset([*range(0, cfg.num_steps, cfg.eval.interval), cfg.num_steps])


class Evaluation:
    """Evaluates one held-out set, any number of times; `view` is from `as_evaluated`. Requests as
    many completions at a time as a generation has: the run's limits were chosen for that."""

    def __init__(
        self,
        view: Config,
        prompts: Sequence[Prompt],
        end_tokens: Sequence[int],
        router: RequestRouter,
        rewards: RewardsBySource,
        partners: Partners,
    ) -> None:
        self.prompts, self.rewards = prompts, rewards
        self._view, self._end_tokens = view, end_tokens
        self._router, self._partners = router, partners
        at_once = view.grpo.generation_batch_size // view.eval.num_generations
        self._num_prompts_at_once = max(1, at_once)
        self._samples: list[Sample] = []
        self._scores: list[dict[str, float]] = []
        self._sampling: list[asyncio.Task[list[Sample]]] = []
        """Tasks of the prompts that are being sampled; kept when the engines are lost."""

    def run(
        self, policy_version: int, timer: PhaseTimer, show: Callable[[int, int], None]
    ) -> Evaluated:
        """Sample all prompts from the served weights `policy_version`, and score the samples.

        Raises what `RequestRouter.until` and `RewardPool.score` raise; after NoServingEngine, a
        call for the same version continues where it stopped.
        """
        num_samples, loop = self._view.eval.num_generations, self._router.loop
        size = len(self.prompts) * num_samples
        self._partners.wait_ready(self.prompts)
        show(len(self._samples) // num_samples, len(self.prompts))
        while len(self._samples) < size:
            with timer.phase("eval", "generate"):
                samples = loop.call(self._sample(policy_version))
            with timer.phase("eval", "score"):
                # The limit is a share of the whole set: in one chunk, a single failure could exceed
                # it.
                scores = self.rewards.score(samples, num_completions=size)
            self._scores += scores
            self._samples += samples
            num_failed = sum(any(map(math.isnan, scores.values())) for scores in self._scores)
            check_failed(num_failed, size, self._view.reward)
            show(len(self._samples) // num_samples, len(self.prompts))
        totals = self.rewards.totals(self._samples, self._scores)
        evaluated = Evaluated(self._samples, self._scores, totals)
        self._samples, self._scores = [], []
        return evaluated

    async def _sample(self, policy_version: int) -> list[Sample]:
        own, router = self._view.eval, self._router
        # After NoServingEngine, the tasks of the last call go on.
        if not self._sampling:
            first = len(self._samples) // own.num_generations
            prompts = self.prompts[first : first + self._num_prompts_at_once]
            self._groups = await self._new_groups(prompts, first, policy_version)
            self._sampling = [asyncio.create_task(each.sample(router)) for each in self._groups]
        samples = await sample_alone(router, self._sampling, policy_version)
        print_failures(self._groups)
        self._sampling = []
        return samples

    async def _new_groups(
        self, prompts: Sequence[Prompt], first: int, policy_version: int
    ) -> list[Group]:
        """Groups of `prompts`, which are at the positions from `first` on in the set."""
        rollout, own = self._view.rollout, self._view.eval
        params = SamplingParams(
            num_generations=own.num_generations,
            policy_version=policy_version,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_completion_length=rollout.max_completion_length,
            stop_token_ids=self._end_tokens,
            stop=rollout.stop,
            seed=self._view.train.seed,
            series=SERIES_OF_EVALUATION,
        )
        features, groups = await features_of(prompts), self._partners.groups(self._view)
        return [
            groups[prompt.source](
                prompt,
                replace(params, position=position),
                position * own.num_generations,
                features.get(prompt.images),
            )
            for position, prompt in enumerate(prompts, first)
        ]


def eval_metrics(evaluated: Evaluated, cfg: EvalSet, name: str = "") -> dict[str, float]:
    """pass@k and mean@n over prompts, rewards and lengths over completions.

    Completions without a score are left out and counted in `eval/failed`; a prompt with fewer than
    k scored completions is left out of pass@k. Metrics without values are omitted.
    """
    n, totals = cfg.num_generations, evaluated.totals
    groups = [
        [total for total in totals[start : start + n] if not math.isnan(total)]
        for start in range(0, len(totals), n)
    ]
    of_prompts = {
        f"pass@{k}": [
            pass_at_k(len(group), sum(passes(total, cfg) for total in group), k)
            for group in groups
            if len(group) >= k
        ]
        for k in cfg.k
    }
    of_prompts[f"mean@{n}"] = [fmean(group) for group in groups if group]
    of_completions = {
        f"reward/{label}/mean": [
            scores[label]
            for scores in evaluated.rewards
            if label in scores and not math.isnan(scores[label])
        ]
        for label in dict.fromkeys(chain(*evaluated.rewards))
    }
    means = {
        metric: fmean(values) for metric, values in (of_prompts | of_completions).items() if values
    }
    reasons = [sample.finish_reason for sample in evaluated.samples]
    lengths = completion_metrics(
        [sample.num_sampled for sample in evaluated.samples],
        [reason == "length" for reason in reasons],
    )
    lengths |= dialogue_metrics(evaluated.samples, evaluated.rewards)
    counts = {"failed": float(sum(map(math.isnan, totals))), "num_prompts": float(len(groups))}
    prefix = metric_prefix(name)
    return {f"{prefix}{metric}": value for metric, value in (means | lengths | counts).items()}


def metrics_of(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the set `name` in the result of `eval_metrics`, without their prefix."""
    prefix = metric_prefix(name)
    return {
        metric.removeprefix(prefix): value
        for metric, value in metrics.items()
        if metric.startswith(prefix)
    }


def eval_rows(evaluated: Evaluated, cfg: EvalSet, name: str = "") -> list[dict[str, Any]]:
    """One row per completion, for JSON; a failed score is null."""
    prompt_column = cfg.data.prompt_column if cfg.data else ""
    columns = columns_by_prompt(evaluated.samples, prompt_column)
    return [
        {
            **({"set": name} if name else {}),
            **sample_row(sample, scores, total, columns),
            "passed": None if math.isnan(total) else passes(total, cfg),
        }
        for sample, scores, total in zip(
            evaluated.samples, evaluated.rewards, evaluated.totals, strict=True
        )
    ]


def passes(total: float, cfg: EvalSet) -> bool:
    return total >= cfg.pass_threshold - ROUNDING


class Evaluations:
    """Evaluates all held-out sets of a config, any number of times."""

    def __init__(
        self,
        cfg: Config,
        shape: ModelShape,
        tokenizer: "PreTrainedTokenizerBase",
        router: RequestRouter,
        pools: RewardPools,
        partners: Partners,
    ) -> None:
        ends = end_tokens(shape, tokenizer, cfg.rollout)
        context = shape.max_position_embeddings
        self._evaluations: dict[str, Evaluation] = {}
        for name in cfg.eval.named_sets:
            view = as_evaluated(cfg, name)
            # Without warnings: the check of the config has printed them.
            prompts = load_eval_prompts(view, name, tokenizer, context, warns=False)
            rewards = RewardsBySource(view.by_source, pools)
            self._evaluations[name] = Evaluation(view, prompts, ends, router, rewards, partners)
        self._done: dict[str, Evaluated] = {}

    def run(
        self, policy_version: int, timer: PhaseTimer, show: Callable[[str, int, int], None]
    ) -> dict[str, Evaluated]:
        """Results by the name of the set; raises what `Evaluation.run` raises."""
        # `_done` keeps finished sets: after NoServingEngine the caller runs all again.
        for name, evaluation in self._evaluations.items():
            if name not in self._done:
                try:
                    self._done[name] = evaluation.run(policy_version, timer, partial(show, name))
                except RewardError as error:
                    raise RewardError(f"{section_of(name)}: {error}") from None
        done, self._done = self._done, {}
        return done
