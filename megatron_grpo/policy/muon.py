"""Muon: matrices move by their orthogonalised momentum, other parameters by AdamW.

Jordan et al., https://kellerjordan.github.io/posts/muon/, with the weight decay and the scale of
Moonlight (Liu et al., arXiv 2502.16982, equation 4). Matrices are those of the weight files, such
as `q_proj` or `down_proj` of one expert, in every layout; embedding and head are excluded.

Megatron-Core's own Muon is not used (test_upstream: muon). It orthogonalises queries, keys and
values apart (`muon_split_qkv`), but gate and up as one matrix, and by default each tensor rank's
part of a matrix alone (`muon_tp_mode`): its updates depend on the layout. It also divides its state
by whole matrices. Here the state stays in the distributed optimizer's ranges, where checkpoints,
offload and clipping know it.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.policy.matrices import MAX_EXCHANGED, matrices_of
from megatron_grpo.policy.optimizer_state import MOMENTUM, shard_of
from parallel import Layout, Shape, ShardMapping
from parallel.flat_range import RangeView, range_overlaps
from parallel.whole_matrices import MatrixPart, WholeMatrices

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of Newton-Schulz steps (https://leloykun.github.io/ponder/muon-opt-coeffs/), as in
Megatron-Core's default `muon_coefficient_type`."""


def newton_schulz(matrix: Tensor) -> Tensor:
    """Approximate U V^T of a matrix U S V^T: singular values become about 1.

    In bfloat16 on a GPU, like the sources above.
    """
    # The iteration needs singular values of at most 1, and Frobenius's norm bounds the largest.
    x = matrix / matrix.norm().clamp_min(1e-7)
    if is_tall := x.shape[0] > x.shape[1]:  # the smaller of the two Gram matrices
        x = x.T
    if x.is_cuda:
        x = x.bfloat16()
    # X <- a X + (b G + c G^2) X with G = X X^T
    for a, b, c in QUINTIC:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


class Muon:
    """Updates the matrices of one of the optimizers that Megatron chains."""

    def __init__(
        self,
        part: Any,
        parameters: Mapping[str, Tensor],
        layout: Layout,
        shapes: Callable[[], Mapping[str, Shape]],
        group: ProcessGroup,
        cfg: OptimizerConfig,
    ) -> None:
        """`part`: one of the optimizers that Megatron chains; `parameters`: tensors of `layout`.

        `group`: all ranks with parts of its matrices. `shapes` returns the shapes of the weight
        files' tensors; the first step calls it.
        """
        self._adam, self._shapes, self._group, self._cfg = part.optimizer, shapes, group, cfg
        self._device = next(iter(parameters.values())).device
        self._shards: set[Tensor] = set()
        self._parts: list[MatrixPart] = []
        self._places: list[tuple[Tensor, RangeView]] = []
        for name, pieces in _pieces(layout).items():
            parameter = parameters[name]
            if parameter not in part.model_param_group_index_map:
                continue
            shard = shard_of(part, parameter)
            self._shards.add(shard)
            owned = part._get_model_param_range_map(parameter)["param"]
            boxes = [piece.local_box for piece in pieces]
            for number, common, view in range_overlaps(
                tuple(parameter.shape), owned.start, owned.end, boxes
            ):
                self._parts.append((pieces[number].tensor, pieces[number].whole_part(common)))
                self._places.append((shard, view))

    @torch.no_grad()
    def step(self, *_: Any) -> None:
        """Update the matrices in a hook before AdamW's step; collective over the group."""
        beta, state = self._cfg.muon_momentum, self._adam.state
        for shard in self._shards:
            assert shard.grad is not None, "set by `prepare_grads`"
            momentum = state[shard][MOMENTUM].lerp_(shard.grad, 1 - beta)
            shard.grad.lerp_(momentum, beta)  # Nesterov's momentum
        parts = [view.select(shard.grad) for shard, view in self._places]
        self._whole.apply(self._update, parts)
        for group in self._adam.param_groups:
            for shard in self._shards.intersection(group["params"]):
                assert shard.grad is not None, "holds the update"
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(shard.grad, alpha=-group["lr"])
                shard.grad = None  # AdamW skips parameters without gradient
                if "step" in state[shard]:  # Transformer Engine's and Apex's Adam count per group
                    state[shard]["step"] += 1

    @cached_property
    def _whole(self) -> WholeMatrices:
        shapes = self._shapes()
        return WholeMatrices(self._parts, shapes, self._group, self._device, MAX_EXCHANGED)

    def _update(self, matrix: Tensor) -> Tensor:
        # Moonlight's equation 4: 0.2 sqrt(max(A, B)) gives the update AdamW's usual size.
        scale = self._cfg.muon_extra_scale_factor * math.sqrt(max(matrix.shape))
        return newton_schulz(matrix).mul_(scale)


def _pieces(layout: Layout) -> dict[str, list[ShardMapping]]:
    """Pieces of each of Muon's parameters, by local name."""
    found: dict[str, list[ShardMapping]] = {name: [] for name in matrices_of(layout)}
    for piece in layout.pieces:
        if piece.local in found:
            found[piece.local].append(piece)
    return found
