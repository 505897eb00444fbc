"""Low-rank adapters of a frozen model (arXiv 2106.09685), with PEFT's names and shapes.

Each linear layer of the weight files has an A [r, in] and a B [out, r] of its own, also where
Megatron fuses several layers (queries, keys and values; gate and up). For a fused layer of n parts
a rank holds one parameter with all As [n r, in] and one with its rows of all Bs [rows, r]. Tensor
ranks split B where the weight has split rows, and A where it has split columns; the other matrix is
whole on each rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import sqrt
from typing import Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear

from checkpoint_convert import ModelShape, hf_tensors
from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.merge import merged
from checkpoint_convert.peft import WEIGHT
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.policy.computed import Computed
from megatron_grpo.policy.lora_targets import (
    Target,
    adapter_sender,
    local_targets,
    peft_tensors,
    starting_adapter,
)
from megatron_grpo.policy.norms import normalized
from parallel import Layout, Sender, ShardMapping
from parallel.checksum import checksum
from parallel.groups import Groups


class Adapter(torch.nn.Module):
    """Adds s B A x to the output of a linear layer."""

    def __init__(self, target: Target, like: Tensor, cfg: LoraConfig, sequence: bool) -> None:
        """`like`: the layer's weight, for dtype and device. `sequence`: sequence parallelism."""
        super().__init__()
        self.target, self.rank, self.scale = target, cfg.r, cfg.scale
        self.sequence = sequence
        rows = [row for part in target.parts for row in part.rows]
        columns = target.columns.size[-1]
        empty = like.new_empty
        self.a = torch.nn.Parameter(empty(len(target.parts) * cfg.r, columns))
        self.b = torch.nn.Parameter(like.new_zeros(len(rows), cfg.r))
        # A and B that the layer computes with; None switches the adapter off.
        self.used: tuple[Tensor, Tensor] | None = (self.a, self.b)
        order = torch.tensor(rows, device=like.device)
        self.register_buffer("rows", order, persistent=False)
        self.is_whole = rows == list(range(len(like)))
        self._mark()

    def _mark(self) -> None:
        """Mark gradients for Megatron: to sum over tensor ranks, and to count once in the norm."""
        a: Any = self.a
        b: Any = self.b
        a.tensor_model_parallel = self.target.split == "columns"
        b.tensor_model_parallel = self.target.split == "rows"
        for each in (a, b):
            each.partition_dim, each.partition_stride = (1 if each is a else 0), 1
            # Each tensor rank sees a part of the tokens: the mark makes Megatron sum the gradient
            # of a copy. A split matrix sees all tokens, after the gather or before the scatter.
            each.sequence_parallel = self.sequence and not each.tensor_model_parallel

    def forward(self, states: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """[..., rows] in the order of the buffer `rows`, from the linear layer's input."""
        low = self._complete(linear(states, a))
        inner = low.split(self.rank, dim=-1)
        sizes = [len(part.rows) for part in self.target.parts]
        outer = b.split(sizes)
        outputs = [linear(x, rows) for x, rows in zip(inner, outer, strict=True) if len(rows)]
        return torch.cat(outputs, dim=-1) * self.scale

    def _complete(self, low: Tensor) -> Tensor:
        """Complete A x for the tokens of this rank's outputs: gather, scatter or reduce."""
        if self.target.split == "rows":
            gather = gather_from_sequence_parallel_region
            return gather(low) if self.sequence else copy_to_tensor_model_parallel_region(low)
        if self.target.split == "columns":
            scatter = reduce_scatter_to_sequence_parallel_region
            reduce = reduce_from_tensor_model_parallel_region
            return scatter(low) if self.sequence else reduce(low)
        return low

    def hook(self, base: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the linear layer `base`, with output (product, bias): add to product."""
        if self.used is None:
            return output
        product, bias = output
        added = self(_normalized(base, args[0]), *self.used)
        if self.is_whole:
            return product + added, bias
        return product.index_add(-1, self.rows, added), bias

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """W + s B A: see `checkpoint_convert.merge.merged`."""
        total, parts = weight.detach().clone(), self.target.parts
        outer = self.b.split([len(part.rows) for part in parts])
        for part, a, b in zip(parts, self.a.split(self.rank), outer, strict=True):
            if part.rows:
                rows = torch.tensor(part.rows, device=b.device)
                total[rows] = merged(weight[rows], a, b, self.scale)
        return total

    @torch.no_grad()
    def initialize(self, init: Literal[True, "gaussian"], seed: int) -> None:
        """Draw A; B is 0, so that training starts from the base model."""
        # A whole A per module, seeded by the module's name: equal in every layout.
        for part, values in zip(self.target.parts, self.a.split(self.rank), strict=True):
            width = self.target.shapes[part.module][1]
            generator = torch.Generator().manual_seed(seed + crc32(part.module.encode()))
            whole = torch.empty(self.rank, width)
            if init == "gaussian":
                whole.normal_(0, 1 / self.rank, generator=generator)
            else:  # PEFT's default: Kaiming's uniform with a = sqrt(5), bounds +-1 / sqrt(in)
                whole.uniform_(-1 / sqrt(width), 1 / sqrt(width), generator=generator)
            values.copy_(whole[:, self.target.columns.slices[-1]])


class Adapters:
    """All adapters of a rank's chunks."""

    def __init__(
        self,
        modules: Mapping[str, Adapter],
        whole: Mapping[str, tuple[int, ...]],
        sender: Sender,
        groups: Groups,
        base: int,
    ) -> None:
        """`modules`: adapters by the local name of the layer's weight; `whole`: PEFT's shapes.

        `sender` describes the adapters' parts on this rank. `base`: checksum of the model's
        weights, which checkpoints of adapters do not contain.
        """
        at = groups.coordinates
        self.modules, self.shapes, self.sender, self.base = modules, whole, sender, base
        self._replica, self._tensor_rank = (at.data, at.context), at.tensor

    @property
    def layout(self) -> Layout:
        """Layout of `parameters`, in the coordinates of PEFT's tensors."""
        return self.sender.layout

    def parameters(self) -> dict[str, Tensor]:
        """All A and B, by the local names of `layout`."""
        return {
            f"{adapter.target.name}.{x}": getattr(adapter, x)
            for adapter in self.modules.values()
            for x in "ab"
        }

    def merged(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sums W + s B A of the layers' `weights`, each computed on access."""
        return Computed(weights, self.modules, lambda n: self.modules[n].merged(weights[n]))

    @torch.no_grad()
    def scaled(self) -> dict[str, Tensor]:
        """A and s B of all adapters: engines apply no scale of their own."""
        return {
            f"{adapter.target.name}.{x}": values
            for adapter in self.modules.values()
            for x, values in (("a", adapter.a.detach()), ("b", adapter.b * adapter.scale))
        }

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with `values` in place of `parameters` meanwhile; if empty, as the base model."""
        for adapter in self.modules.values():
            adapter.used = None
            if values:
                a, b = (values[f"{adapter.target.name}.{x}"] for x in "ab")
                adapter.used = a.to(adapter.a.dtype), b.to(adapter.b.dtype)
        try:
            yield
        finally:
            for adapter in self.modules.values():
                adapter.used = adapter.a, adapter.b

    def sharded(self) -> Iterator[ShardedTensorFactory]:
        """Describe each parameter for Megatron's checkpoints, as parts of PEFT's tensors."""
        for name, values in self.parameters().items():
            pieces = [piece for piece in self.layout.pieces if piece.local == name]
            parted: Any = values
            place = 0 if parted.tensor_model_parallel else self._tensor_rank
            replica = (0, place, self._replica != (0, 0))

            def build(
                key: str,
                data: Tensor,
                replica_id: Any,
                flattened: Any,
                pieces: Sequence[ShardMapping] = pieces,
            ) -> list[ShardedTensor]:
                return [self._part(piece, data, replica_id) for piece in pieces]

            yield ShardedTensorFactory(name, values, build, lambda parts: parts, replica)

    def _part(self, piece: ShardMapping, data: Tensor, replica: Any) -> ShardedTensor:
        return ShardedTensor(
            key=piece.tensor,
            data=data[piece.local_box.slices],
            dtype=data.dtype,
            local_shape=piece.box.size,
            global_shape=self.shapes[piece.tensor],
            global_offset=piece.box.start,
            axis_fragmentations=None,
            replica_id=replica,
        )


def add_adapters(
    chunks: Sequence[Any],
    shape: ModelShape,
    layout: Layout,
    cfg: LoraConfig,
    groups: Groups,
    seed: int | None,
) -> Adapters:
    """Freeze the chunks and give them adapters; collective.

    Weights must be loaded, for their checksum; without a `seed` they need not be, and A stays
    uninitialised.
    """
    weights = {
        f"{number}.{name}": values
        for number, chunk in enumerate(chunks)
        for name, values in chunk.named_parameters()
    }
    base = 0 if seed is None else _fingerprint(weights, shape, layout)
    modules = {}
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_begin_gradients)
    dims, at = groups.dims, groups.coordinates
    targets = list(local_targets(cfg, shape, layout, dims, at))
    for target in targets:
        number, _, name = target.weight.partition(".")
        module = chunks[int(number)].get_submodule(name.removesuffix(WEIGHT))
        sequence = chunks[0].config.sequence_parallel
        adapter = Adapter(target, weights[target.weight], cfg, sequence)
        module.lora = adapter
        module.register_forward_hook(adapter.hook)
        modules[target.weight] = adapter
    sender = adapter_sender(targets, cfg.r, dims, at)
    adapters = Adapters(modules, peft_tensors(cfg, shape), sender, groups, base)
    if seed is not None:
        for adapter in modules.values():
            adapter.initialize(cfg.init_lora_weights, seed)
        if stored := starting_adapter(cfg, shape):
            _fill(adapters, stored.places)
    return adapters


@torch.no_grad()
def _fill(adapters: Adapters, places: Mapping[str, TensorPlace]) -> None:
    """Copy this rank's boxes of stored adapters into its parameters."""
    parameters = adapters.parameters()
    with closing(StoredTensors(places)) as stored:
        for piece in adapters.layout.pieces:
            values = torch.empty(piece.box.size, dtype=DTYPES[places[piece.tensor].dtype])
            stored.read_into(piece.tensor, piece.box, values)
            parameters[piece.local][piece.local_box.slices].copy_(values)


def _begin_gradients(_: Any, args: tuple[Any, ...], output: Tensor) -> None:
    """Make the frozen embedding's output require a gradient."""
    # A recomputed layer is one autograd function to torch: it gets a backward only if its input
    # requires a gradient, whatever its parameters do.
    if torch.is_grad_enabled():
        output.requires_grad_()


def _normalized(base: Any, states: Tensor) -> Tensor:
    """Input of `base`'s product, normed where Transformer Engine fuses the norm into the layer."""
    if getattr(base, "layer_norm_weight", None) is None:
        return states
    return normalized(states, base.layer_norm_weight, base.eps, base.zero_centered_gamma)


def _fingerprint(weights: Mapping[str, Tensor], shape: ModelShape, layout: Layout) -> int:
    """Checksum of the weights in the files' coordinates, equal in every layout; collective."""
    whole, total = hf_tensors(shape), torch.zeros((), dtype=torch.int64)
    for piece in layout.pieces:
        if piece.local in weights and not piece.is_replica:
            values = weights[piece.local].detach()[piece.local_box.slices]
            factor = crc32(piece.tensor.encode()) | 1  # odd, so no bit of a checksum is lost
            total += checksum(values, piece.box, whole[piece.tensor]).cpu() * factor
    dist.all_reduce(total)
    return int(total)
