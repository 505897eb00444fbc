"""Scores samples by the reward functions of their source; see `config/sources.py`."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.rows import Fault, Row
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.pool import RewardPools, Trial
from megatron_grpo.rewards.scoring import Scores, total_rewards
from megatron_grpo.rewards.unit_tests import can_be_run


class RewardsBySource:
    """Reward functions of each source, and rewards of its environment or agent. `views` is
    `Config.by_source`."""

    def __init__(self, views: Mapping[str, Config], pools: RewardPools) -> None:
        self._all_pools = pools
        self._pools = {name: pools.pool_for(view.reward) for name, view in views.items()}
        self._dialogue_terms = {name: view.partner for name, view in views.items()}
        self._terms = {
            name: (view.reward_terms, view.reward.clip_range) for name, view in views.items()
        }
        """(terms of the total reward, bounds of the total) by source."""

    def wait_loaded(self) -> None:
        """Wait until the functions are loaded. Raises what `RewardPool.wait_ready` raises."""
        for pool in self._pools.values():
            pool.wait_ready(())

    def try_out(self, prompts: Sequence[Prompt]) -> list[Trial]:
        """Check the columns of the data, and score trial completions of the first prompt of each
        source. Raises what `RewardPool.wait_ready` and
        `score_trial` raise."""
        trials: list[Trial] = []
        for name, pool in self._pools.items():
            own = [prompt for prompt in prompts if prompt.source == name]
            pool.wait_ready([prompt.row for prompt in own])
            if own:
                trials += pool.score_trial(own[0])
        if self._all_pools.servers:
            self._all_pools.servers.end_round()
        return trials

    def score(self, samples: Sequence[Sample], *, num_completions: float) -> list[Scores]:
        """Scores of every sample by label: one for each function of its source, and `environment`
        or `agent` for a dialogue. Raises what `RewardPool.score` raises."""
        scores: dict[int, Scores] = {}
        with self._all_pools.lock:
            for name, pool in self._pools.items():
                places = [i for i, sample in enumerate(samples) if sample.prompt.source == name]
                if not places:
                    continue
                own = [samples[i] for i in places]
                found = pool.score(own, num_completions=num_completions)
                if term := self._dialogue_terms[name]:
                    for score, sample in zip(found, own, strict=True):
                        score[term] = sample.dialogue_reward
                scores |= zip(places, found, strict=True)
            if self._all_pools.servers:
                self._all_pools.servers.end_round()
        return [scores[i] for i in range(len(samples))]

    def totals(
        self, samples: Sequence[Sample], scores: Sequence[Mapping[str, float]]
    ) -> list[float]:
        """The total reward of each sample, by the terms and bounds of its source."""
        return [
            total_rewards([score], *self._terms[sample.prompt.source])[0]
            for sample, score in zip(samples, scores, strict=True)
        ]


def reference_faults(cfg: Config) -> Callable[[Row], Fault | None]:
    """Make a check of rows: it returns the fault if functions of the row's source cannot read a
    row."""
    faults = {name: reference_fault(view.reward) for name, view in cfg.by_source.items()}
    return lambda row: faults[cfg.sources.of(row)](row)


def reference_fault(cfg: RewardConfig) -> Callable[[Row], Fault | None]:
    """Make a check of rows: it returns the fault if functions cannot read `answer` or `tests`."""
    checks: list[tuple[str, str, Callable[[Any], bool]]] = []
    mathematics = [function.name for function in cfg.functions if _reads_mathematics(function)]
    if mathematics:
        # Imported here: SymPy takes a second to import.
        from megatron_grpo.rewards.math import can_read  # noqa: PLC0415

        checks.append((mathematics[0], "answer", can_read))
    if any(function.name == "unit_tests" for function in cfg.functions):
        checks.append(("unit_tests", "tests", can_be_run))

    def fault(row: Row) -> Fault | None:
        for name, column, is_good in checks:
            if column in row and not is_good(row[column]):
                return Fault(f"no {column} that {name} can read", reprlib.repr(row[column]))
        return None

    return fault


def _reads_mathematics(function: RewardFunction) -> bool:
    accuracy = function.arguments.get("accuracy", "math_answer")
    return function.name == "math_answer" or (
        function.name == "cosine" and accuracy == "math_answer"
    )
