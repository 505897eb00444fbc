"""The function of `grpo.loss_type`: built in, or a user's."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.algorithm import objectives
from megatron_grpo.algorithm.objectives import TokenLosses, importance_ratio
from megatron_grpo.config.grpo import LOSS_TYPES, GRPOConfig, ImportanceLevel
from megatron_grpo.workers.user_file import error_text, load_function
from parallel.sequences import SequenceMeans

INPUTS = ["ratio", "log_ratio", "advantages", "logprobs", "entropy", "rollout_weights", "sequences"]
"""Parameters that a loss function may have, by name."""
OWN_KEYS = ("epsilon", "epsilon_high", "delta")
"""Keys of `grpo` that are given to a user's function that names them."""
LENGTHS = [3, 0, 5]
"""Tokens of a trial's completions; a rank may have none."""
ORDER = [2, 0, 1, 7, 3, 5, 6, 4]
"""A permutation within these completions: a context rank has any of their tokens."""
ROUNDING = 1e-5
"""Relative, in float32: sums over a completion are rounded by the order of its tokens."""


@dataclass(frozen=True, kw_only=True)
class LossFunction:
    """Maps the K tokens of a microbatch to losses [K] before their weights, and other values.

    The function takes those of `INPUTS` that it names, [K] each: the importance `ratio` at `level`,
    `log_ratio` of the tokens, `advantages`, `logprobs` and `entropy` under the policy being
    trained. `sequences.sum(values)` and `.mean(values)` are over whole completions, wherever their
    tokens are. A function with `rollout_weights`, the importance weights of trainer over engine or
    None, applies them; otherwise they multiply the losses.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    arguments: Mapping[str, Any]
    level: ImportanceLevel
    values: tuple[str, ...] = ()
    """Names of the other values, equal on all ranks."""

    @classmethod
    def of(cls, cfg: GRPOConfig, device: torch.device | str = "cpu") -> "LossFunction":
        """Load the function and try it out on `device`; ValueError if it cannot be trained with."""
        known = LOSS_TYPES.get(cfg.loss_type)
        if known:
            function, keys = getattr(objectives, known.function), known.keys
        else:
            function, keys = load_function(cfg.loss_type, "file of a loss"), OWN_KEYS
        parameters = inspect.signature(function).parameters
        inputs = tuple(name for name in INPUTS if name in parameters)
        arguments = {key: getattr(cfg, key) for key in keys if key in parameters}
        if given := {*INPUTS, *OWN_KEYS} & {*cfg.loss_arguments}:
            raise ValueError(
                f"grpo.loss_arguments: the run gives {', '.join(sorted(given))}: leave it out"
            )
        arguments |= cfg.loss_arguments
        try:
            inspect.signature(function).bind(**dict.fromkeys(inputs), **arguments)
        except TypeError as error:
            raise ValueError(
                f"grpo.loss_type {cfg.loss_type}: {error}; the run gives {', '.join(INPUTS)} to a "
                "function that names them, grpo.loss_arguments everything else"
            ) from None
        level = cfg.importance_sampling_level
        loaded = cls(
            name=cfg.loss_type, function=function, inputs=inputs, arguments=arguments, level=level
        )
        weighs = bool(cfg.rollout_importance_sampling_mode or cfg.rollout_rs)
        values = _try_out(loaded, weighs, torch.device(device))
        return replace(loaded, values=tuple(sorted(values)))

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
            given["ratio"] = importance_ratio(logprobs, log_ratio, sequences, self.level)
        found = self.function(**{name: given[name] for name in self.inputs}, **self.arguments)
        losses, values = found if isinstance(found, tuple) else (found, {})
        if rollout_weights is not None and "rollout_weights" not in self.inputs:
            losses = losses * rollout_weights
        return losses, values


def _try_out(loss: LossFunction, weighs: bool, device: torch.device) -> set[str]:
    """Call the function on random tokens; returns the names of its other values.

    ValueError unless all numbers are finite, one per token, the losses have a gradient, and a
    completion gets the same alone as among others, and in any order of its tokens.
    """
    # Where the generating policy is the current one, the log-ratio is 0.
    drawn = torch.randn(4, sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    drawn[0, ::3] = 0
    drawn = drawn.to(device)
    whole = _trial(loss, drawn, LENGTHS, weighs)
    for what, values in whole.items():
        if not values.isfinite().all():
            raise ValueError(
                f"grpo.loss_type {loss.name}: in a trial with log-ratios "
                f"{[round(each, 2) for each in drawn[0].tolist()]} the {what} is "
                f"{values.tolist()}, and must be finite"
            )
    if not whole["gradient"].any():
        raise ValueError(
            f"grpo.loss_type {loss.name}: its losses have no gradient by the log-probabilities: "
            "compute them from ratio, log_ratio or logprobs"
        )
    parts = [_trial(loss, part, [part.shape[1]], weighs) for part in drawn.split(LENGTHS, dim=1)]
    shuffled = _trial(loss, drawn[:, ORDER], LENGTHS, weighs)
    for what, values in whole.items():
        alone = torch.cat([part.get(what, values[:0]) for part in parts])
        is_same = alone.shape == values.shape and torch.allclose(alone, values, ROUNDING, ROUNDING)
        in_order = torch.allclose(shuffled[what], values[ORDER], ROUNDING, ROUNDING)
        if not (is_same and in_order):
            raise ValueError(
                f"grpo.loss_type {loss.name}: the {what} of a completion changes with "
                f"{'the order of its tokens' if is_same else 'the others of its microbatch'}, so "
                "that it would depend on the layout: take `sequences`, whose sum(values) and "
                "mean(values) are over whole completions"
            )
    return whole.keys() - {"loss", "gradient"}


def _trial(
    loss: LossFunction, drawn: Tensor, lengths: list[int], weighs: bool
) -> dict[str, Tensor]:
    """`loss`, its `gradient` by the log-probabilities, and the other values, [K] each."""
    log_ratio, advantages, entropy, weights = drawn
    logprobs = (0.3 * log_ratio - 2).requires_grad_()
    try:
        losses, values = loss(
            logprobs=logprobs,
            log_ratio=logprobs + 2,
            advantages=advantages,
            entropy=entropy.abs(),
            rollout_weights=weights.abs() if weighs else None,
            sequences=SequenceMeans(torch.tensor(lengths, device=drawn.device), None),
        )
    except Exception as error:
        raise ValueError(
            f"grpo.loss_type {loss.name} has failed on {len(logprobs)} tokens: "
            f"{error_text(error, 'the host')}"
        ) from None
    for what, found in ({"loss": losses} | values).items():
        if not isinstance(found, Tensor) or found.shape != logprobs.shape:
            shape = [*found.shape] if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"grpo.loss_type {loss.name}: for {len(logprobs)} tokens its {what} has the shape "
                f"{shape}, not [{len(logprobs)}]"
            )
    gradient = None
    if losses.requires_grad:
        [gradient] = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)
    gradient = torch.zeros_like(logprobs) if gradient is None else gradient
    values = {name: found.detach().float() for name, found in values.items()}
    return {"loss": losses.detach(), "gradient": gradient, **values}
