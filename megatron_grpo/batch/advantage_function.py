"""The function of `grpo.advantage_estimator`: built in, or a user's."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.algorithm.advantages import group_advantages
from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.scoring import GIVEN
from megatron_grpo.workers.user_file import accepted_columns, error_text, load_named


@dataclass(frozen=True)
class AdvantageFunction:
    """Advantages [N] of N scored samples of whole groups, in float64.

    A user's function takes `rewards` [N], NaN for a sample without a score, `group_ids` [N], equal
    for the completions of one prompt, and those columns that it names: lists of N values, of the
    data and of `GIVEN` (`completions`, `completion_ids`, `finish_reasons`, ...).
    """

    cfg: Config
    own: Callable[..., Any] | None

    @classmethod
    def of(cls, cfg: Config) -> "AdvantageFunction":
        """Load the function; ValueError if its file has none."""
        name = cfg.grpo.advantage_estimator
        return cls(cfg, load_named(name, "file of advantages") if ":" in name else None)

    def __call__(self, rewards: Tensor, group_ids: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Raises ValueError if a user's function fails, or returns anything but N finite
        numbers."""
        name, scale = self.cfg.grpo.advantage_estimator, self.cfg.grpo.scale_rewards
        if self.own is None:
            return group_advantages(rewards, group_ids, scale, estimator=name)
        try:
            found = self.own(rewards, group_ids, **self._columns(samples))
        except Exception as error:
            raise ValueError(
                f"grpo.advantage_estimator {name} has failed: {error_text(error, 'the host')}"
            ) from None
        advantages = torch.as_tensor(found, dtype=torch.float64)
        if advantages.shape != rewards.shape:
            raise ValueError(
                f"grpo.advantage_estimator {name} returns the shape {[*advantages.shape]} for "
                f"{len(rewards)} rewards, not [{len(rewards)}]"
            )
        advantages = advantages.masked_fill(rewards.isnan(), 0.0)  # no token of these counts
        if not advantages.isfinite().all():
            raise ValueError(f"grpo.advantage_estimator {name} returns {advantages.tolist()}")
        return advantages

    def _columns(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """The columns that the function takes behind its first two parameters."""
        assert self.own is not None
        parameters = inspect.signature(self.own).parameters
        row = samples[0].prompt.row
        wanted = accepted_columns(parameters) or [*row, *GIVEN]
        values = {name: partial(_of_row, name) for name in row} | GIVEN
        return {
            name: [values[name](sample) for sample in samples]
            for name in wanted
            if name in values and name not in [*parameters][:2]
        }


def _of_row(name: str, sample: Sample) -> Any:
    return sample.prompt.row.get(name)
