"""Linear attention as modules of Megatron-Core, and attention with gates.

Megatron-Core's own `GatedDeltaNet` needs kernels of flash-linear-attention even without a GPU,
computes exp(A_log) in the dtype of the weights where no compiler fuses it, makes the norm of
outputs zero-centred with the other norms, and waits on the host for the lengths of sequences in
every layer. Its `MambaMixer` needs kernels of mamba-ssm (test_upstream: linear_kernels,
decay_dtype, linear_lengths). Here the kernels of flash-linear-attention compute where layers are
Transformer Engine's and the package is installed, and torch elsewhere.

Context ranks exchange tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509): in between, each rank
has all tokens of some heads, and reads their slices of parameters that all context ranks hold.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from checkpoint_convert import ModelShape
from checkpoint_convert.shape import LinearShape, Module
from megatron_grpo.policy.packed_params import PackedParams
from parallel import linear_kernels
from parallel.delta_rule import (
    Convolution,
    Stage,
    activated_convolution,
    gated_delta_rule,
    run_stages,
    unit_heads,
)
from parallel.state_space import state_space


def linear_fields(shape: ModelShape) -> dict[str, Any]:
    """Megatron's fields for linear layers and gates."""
    # Checkpoints keep layers apart where Megatron gets a list: layers of two kinds do not stack.
    layers = [int(layer in shape.linear_layers) for layer in range(shape.num_layers)]
    return {
        "attention_output_gate": shape.has_output_gate,
        "linear_attention_freq": layers if shape.linear_layers else None,
    }


def use_linear_attention(layer: ModuleSpec, linear: LinearShape) -> None:
    """Replace the attention of a layer by linear attention."""
    submodules = layer.submodules.self_attention.submodules
    projections = {"in_proj": submodules.linear_qkv, "out_proj": submodules.linear_proj}
    layer.submodules.self_attention = ModuleSpec(
        module=Mamba if linear.is_mamba else GatedDeltaNet,
        params={"linear": linear, **projections},
    )
    # Only torch's layers map names: Transformer Engine's fuse the norm into `in_proj`, and
    # checkpoints use the fused name.
    names = layer.submodules.sharded_state_dict_keys_map
    if "input_layernorm." in names:
        own = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
        layer.submodules.sharded_state_dict_keys_map = names | own


def use_gates(layer: ModuleSpec, shape: ModelShape) -> None:
    """Give attention output gates where the model has them."""
    if shape.has_output_gate:
        layer.submodules.self_attention.module = GatedAttention


def leave_out(layer: ModuleSpec, kept: tuple[Module, ...]) -> None:
    """Remove attention or MLP from a layer's spec unless `kept`: Nemotron-H has one per layer."""
    modules = layer.submodules
    if not {"attention", "linear"} & {*kept}:
        modules.input_layernorm = modules.self_attention = IdentityOp
        modules.self_attn_bda = IdentityFuncOp
    if not {"mlp", "moe"} & {*kept}:
        modules.pre_mlp_layernorm = modules.mlp = IdentityOp
        modules.mlp_bda = IdentityFuncOp


class LinearAttention(MegatronModule):
    """Linear attention but for its recurrence: projections, context exchange, checkpoints."""

    split: tuple[str, ...] = ("conv1d_weight", "dt_bias", "A_log")
    """Parameters split by heads over tensor ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        linear: LinearShape,
        in_proj: Any,
        out_proj: Any,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.linear, self.layer_number = linear, layer_number
        self.has_kernels = (
            config.transformer_impl == "transformer_engine" and linear_kernels.has_kernels()
        )
        self.tensor_group, self.context_group = pg_collection.tp, pg_collection.cp
        common: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tensor_group,
        }
        groups, heads = linear.num_key_heads, linear.num_value_heads
        values = heads * linear.value_dim
        self.in_proj = build_module(
            in_proj,
            config.hidden_size,
            linear.projected_dim,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.out_proj = build_module(
            out_proj,
            values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        self.conv1d_weight = self._split(groups * linear.mixed_dim, 1, linear.kernel_size)
        self.dt_bias, self.A_log = self._split(heads), self._split(heads)

    @property
    def kind(self) -> str:
        """Class of the layer, and the implementation that computes it."""
        name, package = type(self).__name__, linear_kernels.PACKAGE
        if self.has_kernels:
            return f"{name} ({package})"
        if self.config.transformer_impl == "transformer_engine":
            return f"{name} (torch, without {package}: pip install -e '.[hybrid]')"
        return f"{name} (torch)"

    def _parameter(self, *shape: int) -> Any:
        device, dtype = torch.cuda.current_device(), self.config.params_dtype
        return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def _split(self, rows: int, *columns: int) -> Any:
        parameter = self._parameter(rows // self.tensor_group.size(), *columns)
        # Unmarked parameters count as copies: the gradient norm would take tensor rank 0's alone.
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = 0, 1
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Takes and returns [t, 1, hidden size], or with sequence parallelism a rank's tokens."""
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        group = packed_seq_params.cp_group or self.context_group
        if group.size() > 1:
            order, inverse = packed_seq_params.context_order
            projected = all_to_all_sp2hp(projected, group)[inverse]
        mixed = self._mix(projected, packed_seq_params, group)
        if group.size() > 1:
            mixed = all_to_all_hp2sp(mixed[order], group)
        return self.out_proj(mixed.unsqueeze(1))

    def _own(self, group: Any, dtype: torch.dtype) -> Iterator[Tensor]:
        """Slices of the `split` parameters for the heads of this context rank, in `dtype`."""
        for name in self.split:
            yield getattr(self, name).chunk(group.size())[group.rank()].to(dtype)

    def _mix(self, projected: Tensor, params: PackedParams, group: Any) -> Tensor:
        """[T, values of this rank's heads] from `in_proj`'s output for all T tokens.

        Computes in float32 at least, like the engines, except for products in `linear_kernels`.
        """
        raise NotImplementedError

    @property
    def _convolution(self) -> Convolution:
        return linear_kernels.convolution if self.has_kernels else activated_convolution

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Called by Megatron."""
        assert metadata is not None
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(self.split, 0),
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tensor_group
            )
        return sharded


class GatedDeltaNet(LinearAttention):
    """Linear attention by the gated delta rule."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.out_norm_weight = self._parameter(self.linear.value_dim)

    def _mix(self, projected: Tensor, params: PackedParams, group: Any) -> Tensor:
        linear, size = self.linear, self.linear.group_size
        conv, dt_bias, a_log = self._own(group, _wide(projected.dtype))
        # Per key head: query, key and values, then gates, strengths and decays of its value heads.
        by_group = projected.unflatten(1, (-1, linear.mixed_dim + size * (linear.value_dim + 2)))
        qkv, gate, strength, decay = by_group.split(
            [linear.mixed_dim, size * linear.value_dim, size, size], dim=-1
        )
        x = qkv.flatten(1)
        # Kernels take the model's dtype and accumulate in float32; torch computes in its inputs'.
        x = x if self.has_kernels else x.to(conv.dtype)
        decay = -a_log.exp() * softplus(decay.flatten(1).to(conv.dtype) + dt_bias)
        strength = strength.flatten(1).to(conv.dtype).sigmoid()

        def rule(
            mixed: Tensor, stage: Stage, memory: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            rates = decay[stage.tokens], strength[stage.tokens]
            heads = self._heads(mixed)
            if self.has_kernels:
                return linear_kernels.gated_delta_rule(*heads, *rates, stage, memory)
            return gated_delta_rule(*heads, *rates, stage.chunks, memory)

        kernel = conv.squeeze(1)
        read = run_stages(x, kernel, rule, params.stages, convolution=self._convolution)
        read = read.to(conv.dtype)
        # All heads share the weight, and a tensor rank has some heads: the gradient is a sum over
        # tensor ranks.
        weight = copy_to_tensor_model_parallel_region(self.out_norm_weight, self.tensor_group)
        eps = self.config.layernorm_epsilon
        normed = rms_norm(read, read.shape[-1:], weight.to(conv.dtype), eps)
        gated = normed * silu(gate.unflatten(-1, (size, -1)).flatten(1, 2).to(conv.dtype))
        return gated.flatten(1).to(projected.dtype)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [t, heads, size] from [t, channels].

        Without kernels, queries and keys are normalised to length 1 and repeated for all value
        heads; the kernels do both themselves.
        """
        linear, size = self.linear, self.linear.group_size
        query, key, value = mixed.unflatten(1, (-1, linear.mixed_dim)).split(
            [linear.key_dim, linear.key_dim, size * linear.value_dim], dim=-1
        )
        if not self.has_kernels:
            query, key = (unit_heads(x).repeat_interleave(size, dim=1) for x in (query, key))
        return query, key, value.unflatten(-1, (size, -1)).flatten(1, 2)


class Mamba(LinearAttention):
    """Linear attention of Mamba-2: see `parallel.state_space`."""

    split = (*LinearAttention.split, "conv1d_bias", "D", "out_norm_weight")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        groups, heads = self.linear.num_key_heads, self.linear.num_value_heads
        self.conv1d_bias = self._split(groups * self.linear.mixed_dim)
        self.D = self._split(heads)
        self.out_norm_weight = self._split(heads * self.linear.value_dim)

    def _mix(self, projected: Tensor, params: PackedParams, group: Any) -> Tensor:
        """As in Mamba-2, outputs are gated before the norm, which is over a group's values."""
        linear, size, wide = self.linear, self.linear.group_size, _wide(projected.dtype)
        conv, dt_bias, a_log, bias, skip, weight = self._own(group, wide)
        values = size * linear.value_dim
        by_group = projected.unflatten(1, (-1, values + linear.mixed_dim + size))
        by_group = by_group if self.has_kernels else by_group.to(wide)
        gate, xbc, step = by_group.split([values, linear.mixed_dim, size], dim=-1)
        step = softplus(step.flatten(1).to(wide) + dt_bias)
        decay = -a_log.exp() * step

        def rule(
            mixed: Tensor, stage: Stage, memory: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            x, b, c = mixed.unflatten(1, (-1, linear.mixed_dim)).split(
                [values, linear.key_dim, linear.key_dim], dim=-1
            )
            x = x.unflatten(-1, (size, -1)).flatten(1, 2)
            value, rates = x * step[stage.tokens].unsqueeze(-1), decay[stage.tokens]
            if self.has_kernels:
                value = value.to(x.dtype)
                read, after = linear_kernels.state_space(c, b, value, rates, stage, memory)
            else:
                read, after = state_space(c, b, value, rates, stage.chunks, memory)
            return read + x * skip.unsqueeze(-1), after

        x, kernel = xbc.flatten(1), conv.squeeze(1)
        read = run_stages(x, kernel, rule, params.stages, bias, self._convolution)
        gated = read.flatten(1).unflatten(1, (-1, values)) * silu(gate.to(wide))
        normed = rms_norm(gated, gated.shape[-1:], eps=self.config.layernorm_epsilon)
        return (normed.flatten(1) * weight).to(projected.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class GatedAttention(SelfAttention):
    """Attention with output gates, whose rows keep the order of weight files: query and gate of one
    head, then of the next.

    Megatron-Core's order has all queries of a key-value head before their gates.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and gates, [t, 1, heads of this rank, head size] each."""
        fused, _bias = self.linear_qkv(hidden_states)
        group, num_groups = self.pg_collection.tp, self.config.num_query_groups
        copies = max(1, group.size() // num_groups)  # tensor ranks with the same key
        # With more tensor ranks than keys, Megatron cuts the rows of a key's heads anywhere: gather
        # all rows, then take the key's rows and this rank's share of its queries.
        if copies > 1:
            fused = all_gather_last_dim_from_tensor_parallel_region(fused, group=group)
            fused = fused.chunk(num_groups, dim=-1)[group.rank() // copies]
        size = self.hidden_size_per_attention_head
        by_group = fused.unflatten(-1, (self.num_query_groups_per_partition, -1, size))
        both, key, value = by_group.split([by_group.shape[-2] - 2, 1, 1], dim=-2)
        both = both.flatten(2, 3).unflatten(2, (-1, 2))
        query, gate = both.chunk(copies, dim=2)[group.rank() % copies].unbind(3)
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(3)), value.squeeze(3), gate
