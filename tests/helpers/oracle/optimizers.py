"""Kinds of optimizers on ranks: their updates, memory and checkpoints.

Optimizers that need a GPU run without one too, with Megatron-Core's own code: patches pretend the
GPU in the rank's process, which ends with its test.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any, get_args

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.oracle.policies import (
    LENGTHS,
    accumulate,
    checkpoints_of,
    pack_all,
    save_checkpoint,
    start_policy,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints import manifest
from megatron_grpo.checkpoints.state import optimizer_parts, weight_parts
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.policy import optimizer as policy_optimizer
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.muon import QUINTIC
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from megatron_grpo.policy.optimizer_state import SplitFloats
from megatron_grpo.timing import PhaseTimer
from parallel import Box, ParallelDims, Shape
from parallel.groups import Groups


class _HostTensors(TorchFunctionMode):
    """Tensors are in host memory if they came from ``cpu()``, and on a GPU otherwise."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not getattr(args[0], "is_on_host", False)
        if func is Tensor.pin_memory:
            return args[0]
        kwargs.pop("pin_memory", None)
        result = args[0].clone() if func is Tensor.cpu else func(*args, **kwargs)
        if func in (Tensor.cpu, Tensor.detach, Tensor.clone, Tensor.float):
            result.is_on_host = func is Tensor.cpu or getattr(args[0], "is_on_host", False)
        return result


def allow_offload() -> None:
    """Let ``optimizer.optimizer_cpu_offload`` run, with one memory for both devices."""
    _pretend_transformer_engine()
    torch.accelerator.empty_host_cache = lambda: None
    for name in ("_init_sub_optimizers", "step"):
        setattr(
            HybridDeviceOptimizer, name, _with_pretended_gpu(getattr(HybridDeviceOptimizer, name))
        )


def _pretend_transformer_engine() -> None:
    policy_optimizer.check_optimizer = lambda cfg: None
    for config in (megatron_optimizer, optimizer_config):
        config.is_te_min_version = lambda version: True


def _with_pretended_gpu(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _HostTensors():
            return method(*args, **kwargs)

    return wrapped


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix with its singular values mapped by the quintics, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm().clamp_min(1e-7)  # experts without tokens have no gradient
    for a, b, c in QUINTIC:
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's FusedAdam, in the precision-aware optimizer: bfloat16 weights, separate
    gradients (`decoupled_grad`), and the interface that Megatron-Core and the trainer use."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        master_weights: bool,
        use_decoupled_grad: bool,
        master_weight_dtype: torch.dtype,
        store_param_remainders: bool,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and master_weights and use_decoupled_grad and store_param_remainders
        assert master_weight_dtype == torch.float32 and not capturable
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.use_decoupled_grad = self.store_param_remainders = True
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders and param.dtype == torch.bfloat16
        self.state[param] = {
            name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.dtypes.items()
        }
        self.state[param]["master_param"] = torch.zeros_like(param, dtype=torch.int16)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self._update(group, param, self.state[param])

    @staticmethod
    def _update(group: dict[str, Any], param: Tensor, state: dict[str, Tensor]) -> None:
        (beta1, beta2), number = group["betas"], group["step"]
        gradient = param.decoupled_grad.float()  # type: ignore[attr-defined]
        first = state["exp_avg"].float().mul_(beta1).add_(gradient, alpha=1 - beta1)
        second = (
            state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        )
        # A float32 master is split into halves; the upper, the bfloat16 weight, was rounded, so a
        # negative lower half means that the upper is one too large.
        rest = state["master_param"].int()
        upper = param.view(torch.int16).int() - (rest < 0).int()
        master = ((upper << 16) | (rest & 0xFFFF)).view(torch.float32)
        step = (first / (1 - beta1**number)) / (
            (second / (1 - beta2**number)).sqrt() + group["eps"]
        )
        master = master - group["lr"] * (step + group["weight_decay"] * master)
        bits = master.view(torch.int32)
        low = (bits & 0xFFFF).to(torch.int16)
        state["master_param"].copy_(low)
        param.copy_(((bits >> 16) + (low < 0).int()).to(torch.int16).view(torch.bfloat16))
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)


def _allow_precision_aware() -> None:
    """Let ``optimizer.use_precision_aware_optimizer`` run, with the `FusedAdam` here."""
    _pretend_transformer_engine()
    module: Any = ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam
    sys.modules[module.__name__] = (
        module  # Megatron's config inspects the arguments of FusedAdam there
    )
    for user in (megatron_optimizer, distrib_optimizer):
        user.Adam = FusedAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False


BFLOAT16 = (
    "model.dtype=bfloat16",
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0.1",
    # As large as elements of a clipped gradient: else Adam turns rounding errors into full steps.
    "optimizer.adam_eps=1e-3",
)
_SHORT_GRADIENTS = "optimizer.grad_reduce_in_fp32=false"
_PRECISE = "optimizer.use_precision_aware_optimizer=true"
_SHORT_MOMENTS = "optimizer.exp_avg_dtype=bfloat16", "optimizer.exp_avg_sq_dtype=bfloat16"
_HOST = "optimizer.optimizer_cpu_offload=true"
_HALF = "optimizer.optimizer_offload_fraction=0.5"
_NAMES = get_args(OptimizerConfig.model_fields["optimizer"].annotation)
NAMED = {name: (f"optimizer.optimizer={name}",) for name in _NAMES if name != "adam"}
"""Optimizers with updates of their own."""
KINDS: dict[str, tuple[str, ...]] = {
    **NAMED,
    "float32": (),
    "short gradients": (_SHORT_GRADIENTS,),
    "precise": (_PRECISE,),
    "precise, short gradients": (_PRECISE, _SHORT_GRADIENTS),
    "precise, short moments": (_PRECISE, _SHORT_GRADIENTS, *_SHORT_MOMENTS),
    "host": (_HOST,),
    "half on the host": (_HOST, _HALF),
    "half on the host, short gradients": (_HOST, _HALF, _SHORT_GRADIENTS),
}
"""Overrides of each kind of optimizer, all for bfloat16 weights."""


def start_kind(rank: int, folder: Path, dims: ParallelDims, kind: str) -> tuple[Policy, Groups]:
    """`start_policy` with an optimizer of `KINDS`; without a GPU, its patches."""
    if not torch.cuda.is_available():
        if _HOST in KINDS[kind]:
            allow_offload()
        if _PRECISE in KINDS[kind]:
            _allow_precision_aware()
    return start_policy(rank, folder, dims, *BFLOAT16, *KINDS[kind])


Parts = list[tuple[str, Box, Shape, Tensor]]
"""(key, box, shape of the whole tensor, values) of each part."""
Whole = dict[str, Tensor]


def take_step(policy: Policy, groups: Groups, updates: int = 1) -> None:
    """Compute one gradient and apply it `updates` times."""
    device = next(iter(policy.parameters().values())).device
    share = pack_all(LENGTHS, groups.dims)[groups.coordinates.data :: groups.dims.data]
    accumulate(policy, groups, [batch.to(device) for batch in share])
    for _ in range(updates):
        apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))


def state_of(policy: Policy) -> Parts:
    """This rank's parts of weights, master weights and moments."""
    return [
        (part.key, part.box, part.shape, _copy(part.values))
        for part in weight_parts(policy) + optimizer_parts(policy)
    ]


def _copy(values: Tensor | SplitFloats) -> Tensor:
    found = values.joined() if isinstance(values, SplitFloats) else values.detach().clone()
    return found.cpu()


def wholes(ranks: Sequence[Sequence[Parts]]) -> list[Whole]:
    """Whole tensors of each state, assembled from the parts that the ranks returned."""
    states: list[Whole] = []
    for state_parts in zip(*ranks, strict=True):
        states.append({})
        for key, box, shape, values in (part for parts in state_parts for part in parts):
            empty = torch.full(shape, torch.nan, dtype=values.dtype)
            states[-1].setdefault(key, empty)[box.slices] = values
    return states


def before_and_after(rank: int, folder: Path, dims: ParallelDims, kind: str) -> list[Parts]:
    policy, groups = start_kind(rank, folder, dims, kind)
    before = state_of(policy)
    take_step(policy, groups, 3)
    return [before, state_of(policy)]


def changes(folder: Path, dims: ParallelDims, kind: str, cuda: bool = False) -> Whole:
    """Changes of the master weights by three updates with one gradient: gradients of the updated
    weights would differ between layouts by bfloat16's rounding errors."""
    ranks = run_ranks(dims.world_size, before_and_after, folder, dims, kind, cuda=cuda)
    before, after = wholes(ranks)
    return {
        key: after[key] - values
        for key, values in before.items()
        if key.startswith("optimizer.state.param.")
    }


def largest_error(found: Whole, expected: Whole) -> float:
    """Largest norm of a tensor's error, as a fraction of the tensor's norm."""
    assert found.keys() == expected.keys() and found
    return max(
        float((found[key] - values).norm() / values.norm()) for key, values in expected.items()
    )


def train_and_save(
    rank: int, folder: Path, dims: ParallelDims, kind: str, run: Path
) -> list[Parts]:
    """The saved state, and the state after one more step."""
    policy, groups = start_kind(rank, folder, dims, kind)
    take_step(policy, groups, 2)
    save_checkpoint(run, 2, policy, folder, dims)
    saved = state_of(policy)
    take_step(policy, groups)
    return [saved, state_of(policy)]


def save_during_a_step(
    rank: int, folder: Path, dims: ParallelDims, kind: str, run: Path
) -> list[Parts]:
    """The saved state. A step is taken before the files are written: their writer starts when the
    step waits for it, or is over."""
    policy, groups = start_kind(rank, folder, dims, kind)
    take_step(policy, groups, 2)
    checkpoints = checkpoints_of(run, policy, folder, dims, *BFLOAT16, *KINDS[kind])
    starts, write = Event(), manifest.write_hashed

    def write_late(*args: Any) -> Any:
        starts.wait()
        return write(*args)

    manifest.write_hashed = write_late
    checkpoints.save(TrainerState(step=2), {})
    saved = state_of(policy)
    checkpoints.before_update(PhaseTimer(lambda phase: starts.set()))
    take_step(policy, groups)
    starts.set()
    checkpoints.wait()
    return [saved]


def load_and_save(
    rank: int, folder: Path, dims: ParallelDims, kind: str, run: Path, again: Path
) -> list[Parts]:
    """The loaded state, which is also saved to `again`, and the state after one more step."""
    policy, groups = start_kind(rank, folder, dims, kind)
    assert checkpoints_of(run, policy, folder, dims).load().step == 2
    save_checkpoint(again, 2, policy, folder, dims)
    loaded = state_of(policy)
    take_step(policy, groups)
    return [loaded, state_of(policy)]


def assert_same(found: Whole, expected: Whole, last_bits: int = 0) -> None:
    """Assert equal tensors, rounded to the dtype found; master weights up to `last_bits`."""
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        if key.startswith("optimizer.state.param."):
            differ = (found[key].view(torch.int32) - values.view(torch.int32)).abs()
            assert differ.max() <= last_bits, key
        else:
            assert torch.equal(found[key], values.to(found[key].dtype)), key


def bytes_kept(rank: int, folder: Path, dims: ParallelDims, kind: str) -> tuple[int, int, int]:
    """Bytes after a step: of the optimizer on the GPU, on the host, and of gradients."""
    policy, groups = start_kind(rank, folder, dims, kind)
    take_step(policy, groups)
    policy.optimizer.zero_grad()
    buffers = [b for chunk in policy.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    memory = {b.grad_data.untyped_storage().data_ptr() for b in buffers}
    memory |= {p.untyped_storage().data_ptr() for p in policy.parameters().values()}
    kept = {False: 0, True: 0}
    for part in policy.optimizer.chained_optimizers:
        inner = part.optimizer
        on_host = getattr(inner, "cpu_optimizers", [])
        for adam in getattr(inner, "sub_optimizers", [inner]):
            for parameter, state in adam.state.items():
                for tensor in (parameter, parameter.grad, *state.values()):
                    if not isinstance(tensor, Tensor) or not tensor.shape:
                        continue  # counts of steps
                    if (place := tensor.untyped_storage().data_ptr()) not in memory:
                        memory.add(place)
                        is_pinned = adam in on_host and tensor is parameter.grad
                        kept[adam in on_host] += (
                            _power(tensor.nbytes) if is_pinned else tensor.nbytes
                        )
    return kept[False], kept[True], sum(b.grad_data.nbytes for b in buffers)


def _power(num_bytes: int) -> int:
    """Bytes that torch allocates for a pinned tensor: the next power of two."""
    return 1 << (num_bytes - 1).bit_length()
