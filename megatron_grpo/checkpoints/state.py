"""A rank's part of the training state: the boxes of whole tensors that its memory holds.

Keys, shapes and offsets are Megatron-Core's own (`sharded_state_dict`), so its `dist_checkpointing`
can load these files. The distributed optimizer splits master weights and moments into ranges of the
concatenated parameters; these are cut into boxes of their tensors, so no tensor is gathered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_grpo.policy.model import Model, Policy, unwrapped
from megatron_grpo.policy.optimizer_state import (
    SplitFloats,
    set_steps_taken,
    states_of,
    steps_taken,
)
from megatron_grpo.policy.reference import Reference
from megatron_grpo.policy.residency import chained_optimizers
from parallel import Box, Layout, Shape, ShardMapping
from parallel.flat_range import range_overlaps

REFERENCE = "reference."
"""Prefix of the keys of a reference that follows the policy."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """A box of a whole tensor, in this rank's memory."""

    key: str
    shape: Shape
    """Shape of the whole tensor."""
    box: Box
    values: Tensor | SplitFloats
    """[box.size], a view of the live tensor."""
    is_replica: bool
    """Whether another rank has the same part and writes it."""
    is_padded: bool
    """Whether the whole tensor may end in zero rows that only this layout adds."""


def weight_parts(policy: Policy) -> list[StatePart]:
    """Parts of the policy's weights, or of its adapters: frozen weights are not saved."""
    return _parts_of(policy, policy.saved_parameters(), "")


def _parts_of(model: Model, tensors: Mapping[str, Tensor], prefix: str) -> list[StatePart]:
    """Parts of `tensors`, which have the names and shapes of the model's saved parameters."""
    names = {parameter: name for name, parameter in model.saved_parameters().items()}
    return [
        StatePart(
            key=prefix + part.key,
            shape=tuple(part.global_shape),
            box=Box(tuple(part.global_offset), _stacked(part, tuple(part.local_shape))),
            values=_with_stack(part, tensors[names[sharded.data]].detach()[within.slices]),
            is_replica=not is_main_replica(part.replica_id),
            is_padded=part.allow_shape_mismatch,
        )
        for sharded in _sharded(model)
        if not isinstance(sharded, ShardedObject)
        for part, within in _parts(sharded)
    ]


def weight_layout(model: Model) -> Layout:
    """Boxes of the parameters in a checkpoint's tensors, according to Megatron-Core.

    Local names are those of `Model.parameters`. Shapes have leading dimensions of size 1, along
    which a checkpoint stacks layers and experts.
    """
    names = {parameter: name for name, parameter in model.parameters().items()}
    shapes, pieces = {}, []
    for sharded in _sharded(model):
        if isinstance(sharded, ShardedObject):
            continue
        for part, within in _parts(sharded):
            name = names[sharded.data]
            local = Box(_stacked(part, within.start, 0), _stacked(part, within.size))
            box = _whole_box(part, Box.whole(within.size))
            shapes[name] = _stacked(part, tuple(sharded.data.shape))
            pieces.append(ShardMapping(name, local, part.key, box))
    return Layout(shapes, tuple(pieces))


def optimizer_parts(policy: Policy) -> list[StatePart]:
    """Parts of the master weights and moments that this rank's optimizer updates."""
    sharded_of: dict[Tensor, list[Any]] = {}
    for sharded in _sharded(policy):
        if not isinstance(sharded, ShardedObject):
            sharded_of.setdefault(sharded.data, []).append(sharded)
    return [
        found
        for part in chained_optimizers(policy)
        for parameter in part.model_param_group_index_map
        for sharded in sharded_of[parameter]
        for found in _states_of(part, parameter, sharded)
    ]


def object_names(policy: Policy) -> list[str]:
    """Names of empty entries that Megatron requires; ValueError if one is not, such as FP8
    scales."""
    objects = [sharded for sharded in _sharded(policy) if isinstance(sharded, ShardedObject)]
    full = [each.key for each in objects if isinstance(each.data, Tensor) and each.data.numel()]
    if full:
        raise ValueError(
            f"checkpoints cannot hold the state {full[0]}: leave fp8 out of model.megatron"
        )
    return [each.unique_key for each in objects if is_main_replica(each.replica_id)]


def parts_saved(policy: Policy, reference: Reference | None) -> list[StatePart]:
    parts = weight_parts(policy) + optimizer_parts(policy)
    if reference is not None and reference.averaged_weights:  # it follows the policy
        parts += _parts_of(reference, reference.averaged_weights, REFERENCE)
    return parts


def num_bytes_saved(policy: Policy, reference: Reference | None) -> int:
    """This rank's share of the bytes of a checkpoint's tensors; the shares add up to the total."""
    return sum(
        part.box.num_elements * part.values.itemsize
        for part in parts_saved(policy, reference)
        if not part.is_replica
    )


def counters(policy: Policy) -> dict[str, Any]:
    """State that is equal on all ranks: optimizer steps taken and the learning-rate schedule."""
    return {
        "optimizer_steps": steps_taken(policy.optimizer),
        "scheduler": policy.scheduler.state_dict(),
        **({"mtp_steps": policy.mtp.num_steps} if policy.mtp else {}),
    }


def set_counters(policy: Policy, saved: Mapping[str, Any]) -> None:
    """Restore `counters`."""
    set_steps_taken(policy.optimizer, saved["optimizer_steps"])
    # Megatron's `load_state_dict` adds to this, and a checkpoint that failed to load may have set
    # it.
    policy.scheduler.num_steps = 0
    policy.scheduler.load_state_dict(saved["scheduler"])
    if policy.mtp:
        policy.mtp.num_steps = saved["mtp_steps"]
        set_steps_taken(policy.mtp.optimizer, saved["mtp_steps"])


def random_state() -> Tensor:
    """Bytes [n]: the concatenated states of torch's generators and of Megatron's on CUDA."""
    return torch.cat(_random_states())


def set_random_state(row: Tensor) -> None:
    """Restore `random_state`, unless it has other generators: a CPU has fewer than a GPU."""
    lengths = [len(state) for state in _random_states()]
    if len(row) != sum(lengths):
        return
    cpu, *others = row.split(lengths)
    torch.set_rng_state(cpu.clone())
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(others[0].clone())
        names = sorted(get_cuda_rng_tracker().get_states())
        tracked = dict(zip(names, (state.clone() for state in others[1:]), strict=True))
        get_cuda_rng_tracker().set_states(tracked)


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        tracked = get_cuda_rng_tracker().get_states()
        states += [torch.cuda.get_rng_state(), *(tracked[name].cpu() for name in sorted(tracked))]
    return states


def _sharded(model: Model) -> Iterator[Any]:
    """Megatron's descriptions of every parameter, and of other objects of the modules. A model with
    adapters gives the adapters alone, as PEFT's tensors."""
    if model.adapters is not None:
        yield from model.adapters.sharded()
        return
    for chunk in model.chunks:
        yield from nested_values(unwrapped(chunk).sharded_state_dict(metadata={}))
    if model.mtp is not None:
        yield from nested_values(model.mtp.sharded_state_dict())


def _parts(sharded: Any) -> Iterator[tuple[ShardedTensor, Box]]:
    """Parts of a parameter that are separate in the whole tensor, each with its box in the
    parameter. A factory has several: it describes the fused gate and up."""
    is_cut = isinstance(sharded, ShardedTensorFactory)
    for part in nested_values(sharded.build()) if is_cut else [sharded]:
        yield part, _box_within(part.data, sharded.data)


def _box_within(view: Tensor, whole: Tensor) -> Box:
    assert view.stride() == whole.stride(), "a part of a parameter is a box of it"
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "not a copy"
    # Row-major, so strides fall from dimension to dimension: each takes its index off the offset.
    offset, start = int(view.storage_offset()) - int(whole.storage_offset()), []
    for stride in whole.stride():
        index, offset = divmod(offset, stride)
        start.append(index)
    return Box(tuple(start), tuple(view.shape))


def _states_of(optimizer: Any, parameter: Tensor, sharded: Any) -> Iterator[StatePart]:
    """This rank's range of a parameter's optimizer states, box by box."""
    owned = optimizer._get_model_param_range_map(parameter)["param"]
    states, pieces = states_of(optimizer, parameter), list(_parts(sharded))
    boxes = [within for _, within in pieces]
    for number, common, view in range_overlaps(
        tuple(parameter.shape), owned.start, owned.end, boxes
    ):
        part, within = pieces[number]
        for name, values in states.items():
            yield StatePart(
                key=f"optimizer.state.{name}.{part.key}",
                shape=tuple(part.global_shape),
                box=_whole_box(part, common.moved(within.start, (0,) * len(within.start))),
                values=_with_stack(part, view.select(values)),
                # `replica_id` ends in the data rank. Data ranks hold copies of a weight, but
                # distinct parts of its states, so each writes its own.
                is_replica=not is_main_replica((*part.replica_id[:-1], 0)),
                is_padded=part.allow_shape_mismatch,
            )


def _whole_box(part: ShardedTensor, inside: Box) -> Box:
    """Move a box of a part to the coordinates of the whole tensor."""
    offset = tuple(part.global_offset)
    start = _stacked(part, inside.start, 0)
    return Box(
        tuple(a + b for a, b in zip(offset, start, strict=True)), _stacked(part, inside.size)
    )


def _stacked(part: ShardedTensor, shape: Shape, extent: int = 1) -> Shape:
    """Prepend the dimensions along which Megatron stacks parameters to a shape of a part."""
    return (extent,) * part.prepend_axis_num + shape


def _with_stack(part: ShardedTensor, values: Tensor | SplitFloats) -> Tensor | SplitFloats:
    return values[(None,) * part.prepend_axis_num]
