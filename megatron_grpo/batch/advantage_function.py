"""The function of `grpo.advantage_estimator`: built in, or a user's."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.algorithm.advantages import group_advantages
from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.scoring import GIVEN, ONLY_BY_NAME, RewardError
from megatron_grpo.workers.user_file import (
    accepted_columns,
    error_text,
    load_function,
    missing_column,
    required_parameters,
)


@dataclass(frozen=True)
class AdvantageFunction:
    """Advantages [N] of N scored samples of whole groups, in float64.

    A user's function takes what it names of `rewards` [N], NaN for a sample without a score,
    `group_ids` [N], equal for the completions of one prompt, and columns of N values: those of the
    data, and of `GIVEN`.
    """

    cfg: Config
    own: Callable[..., Any] | None

    @classmethod
    def of(cls, cfg: Config) -> "AdvantageFunction":
        """Load the function; ValueError if its file has none."""
        name = cfg.grpo.own_functions.get("advantage_estimator")
        return cls(cfg, load_function(name, "file of advantages") if name else None)

    def __call__(self, rewards: Tensor, group_ids: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Raises RewardError if a user's function fails, or does not return N finite numbers."""
        name, scale = self.cfg.grpo.advantage_estimator, self.cfg.grpo.scale_rewards
        if self.own is None:
            return group_advantages(rewards, group_ids, scale, estimator=name)
        try:  # with copies, which the function may change
            given = {"rewards": rewards.clone(), "group_ids": group_ids.clone()}
            found = self.own(**self._selected(given, samples))
            advantages = torch.as_tensor(found, dtype=torch.float64)
        except Exception as error:
            text = error_text(error, "the host")
            raise RewardError(f"grpo.advantage_estimator {name} has failed: {text}") from None
        if advantages.shape != rewards.shape:
            raise RewardError(
                f"grpo.advantage_estimator {name} returns the shape {[*advantages.shape]} for "
                f"{len(rewards)} rewards, not [{len(rewards)}]"
            )
        advantages = advantages.masked_fill(rewards.isnan(), 0.0)  # no token of these counts
        if not advantages.isfinite().all():
            wrong = int((~advantages.isfinite()).nonzero()[0])
            group = rewards[group_ids == group_ids[wrong]].tolist()
            raise RewardError(
                f"grpo.advantage_estimator {name} returns {advantages[wrong]:g} in a group with "
                f"the rewards {group}"
            )
        return advantages

    def check_columns(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for a parameter without a default that is no column of all `rows`."""
        if self.own is None:
            return
        for name in required_parameters(inspect.signature(self.own).parameters):
            known = {"rewards", "group_ids", *GIVEN}
            if name not in known and (missing := missing_column(name, rows)):
                raise ValueError(
                    f"grpo.advantage_estimator {self.cfg.grpo.advantage_estimator} requires "
                    f"{name!r}: {missing}"
                )

    def _selected(self, given: dict[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
        """The parameters of the function."""
        assert self.own is not None
        columns = {name for sample in samples for name in sample.prompt.row} | GIVEN.keys()
        names = accepted_columns(inspect.signature(self.own).parameters)
        if names is None:
            names = [*(columns - {ONLY_BY_NAME}), *given]
        return {name: given[name] for name in given.keys() & {*names}} | {
            name: [
                GIVEN[name](each) if name in GIVEN else each.prompt.row.get(name)
                for each in samples
            ]
            for name in (columns - given.keys()) & {*names}
        }
