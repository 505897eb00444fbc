"""The function of `grpo.loss_type`: built in, or a user's."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.algorithm import objectives
from megatron_grpo.algorithm.objectives import TokenLosses, importance_ratio
from megatron_grpo.config.grpo import LOSS_TYPES, GRPOConfig
from megatron_grpo.workers.user_file import error_text, load_named
from parallel.sequences import SequenceMeans

INPUTS = (
    *("ratio", "log_ratio", "advantages", "logprobs", "entropy"),
    *("rollout_weights", "sequences"),
)
"""Parameters that a loss function may have, by name."""
OWN_KEYS = ("epsilon", "epsilon_high", "delta")
"""Keys of `grpo` that are given to a user's function that names them."""
LENGTHS = [3, 0, 5]
"""Tokens of the trial's completions; a rank may have none."""
ROUNDING = 1e-5
"""Relative, in float32: the order of a sum over a completion may differ."""


@dataclass(frozen=True, kw_only=True)
class LossFunction:
    """Maps the K tokens of a microbatch to losses [K] before their weights, and other values.

    The function takes those of `INPUTS` that it names, [K] each: the importance `ratio` at
    `grpo.importance_sampling_level`, `log_ratio` of the tokens, `advantages`, `logprobs` and
    `entropy` under the policy being trained. `sequences.sum(values)` and `.mean(values)` are over
    whole completions, wherever their tokens are. Who takes `rollout_weights`, the importance
    weights of trainer over engine or None, applies them; otherwise they multiply the losses.
    """

    cfg: GRPOConfig
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    arguments: Mapping[str, Any]
    values: tuple[str, ...] = ()
    """Names of the other values, equal on all ranks: found by `tried`."""

    @classmethod
    def of(cls, cfg: GRPOConfig) -> "LossFunction":
        """Load the function and try it out; ValueError if it cannot be trained with."""
        known = LOSS_TYPES.get(cfg.loss_type)
        if known:
            function, keys = getattr(objectives, known.function), known.keys
        else:
            function, keys = load_named(cfg.loss_type, "file of a loss"), OWN_KEYS
        parameters = inspect.signature(function).parameters
        inputs = tuple(name for name in INPUTS if name in parameters)
        arguments = {key: getattr(cfg, key) for key in keys if key in parameters}
        try:
            inspect.signature(function).bind(
                **dict.fromkeys(inputs), **(arguments | cfg.loss_arguments)
            )
        except TypeError as error:
            raise ValueError(
                f"grpo.loss_type {cfg.loss_type}: {error}; the run gives {', '.join(INPUTS)} to a "
                "function that names them, grpo.loss_arguments everything else"
            ) from None
        arguments |= cfg.loss_arguments
        return cls(cfg=cfg, function=function, inputs=inputs, arguments=arguments).tried()

    def tried(self) -> "LossFunction":
        """Call the function on random tokens: ValueError unless losses are finite, one per token,
        with a gradient, and those of a completion the same with and without others."""
        name, random = self.cfg.loss_type, torch.Generator().manual_seed(0)
        drawn = torch.randn(3, sum(LENGTHS), generator=random)
        whole, values, gradient = self._trial(drawn, LENGTHS)
        alone = [self._trial(part, [part.shape[1]])[0] for part in drawn.split(LENGTHS, dim=1)]
        if not (whole.isfinite().all() and gradient.isfinite().all()):
            raise ValueError(
                f"grpo.loss_type {name}: a trial gave losses {whole.tolist()} with the "
                f"gradients {gradient.tolist()}, which must be finite"
            )
        if not gradient.any():
            raise ValueError(
                f"grpo.loss_type {name}: its losses have no gradient by the "
                "log-probabilities: compute them from ratio, log_ratio or logprobs"
            )
        if not torch.allclose(whole, torch.cat(alone), rtol=ROUNDING, atol=ROUNDING):
            raise ValueError(
                f"grpo.loss_type {name}: the losses of a completion change with the others in its "
                "microbatch, so the result would depend on the layout: take `sequences`, whose "
                "sum(values) and mean(values) are over whole completions"
            )
        return replace(self, values=tuple(sorted(values)))

    def _trial(self, drawn: Tensor, lengths: list[int]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Losses, other values, and the gradient by the log-probabilities."""
        log_ratio, advantages, entropy = drawn * torch.tensor([[0.3], [1.0], [1.0]])
        logprobs = (log_ratio - 2).requires_grad_()
        try:
            losses, values = self(
                logprobs=logprobs,
                log_ratio=logprobs + 2,
                advantages=advantages,
                entropy=entropy.abs(),
                rollout_weights=None,
                sequences=SequenceMeans(torch.tensor(lengths), None),
            )
            shapes = {"loss": losses.shape} | {name: each.shape for name, each in values.items()}
        except Exception as error:
            raise ValueError(
                f"grpo.loss_type {self.cfg.loss_type} has failed on {len(log_ratio)} tokens: "
                f"{error_text(error, 'the host')}"
            ) from None
        if wrong := {name: [*each] for name, each in shapes.items() if each != log_ratio.shape}:
            raise ValueError(
                f"grpo.loss_type {self.cfg.loss_type}: for {len(log_ratio)} tokens it returns "
                f"shapes {wrong}, not [{len(log_ratio)}]"
            )
        if not losses.requires_grad:
            return losses, values, torch.zeros_like(logprobs)
        [gradient] = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)
        return losses.detach(), values, torch.zeros_like(logprobs) if gradient is None else gradient

    def __call__(
        self,
        *,
        logprobs: Tensor,
        log_ratio: Tensor,
        advantages: Tensor,
        entropy: Tensor,
        rollout_weights: Tensor | None,
        sequences: SequenceMeans,
    ) -> TokenLosses:
        given = {
            "log_ratio": log_ratio,
            "advantages": advantages,
            "logprobs": logprobs,
            "entropy": entropy,
            "rollout_weights": rollout_weights,
            "sequences": sequences,
        }
        if "ratio" in self.inputs:
            level = self.cfg.importance_sampling_level
            given["ratio"] = importance_ratio(logprobs, log_ratio, sequences, level)
        found = self.function(**{name: given[name] for name in self.inputs}, **self.arguments)
        losses, values = found if isinstance(found, tuple) else (found, {})
        if rollout_weights is not None and "rollout_weights" not in self.inputs:
            losses = losses * rollout_weights
        return losses, values
