"""The feed-forward part of a layer: an MLP, gated or not, or a mixture of experts in its place.

A mixture has a router, experts and perhaps a shared expert, which processes every token.
"""

from dataclasses import dataclass, replace

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import (
    Experts,
    InVllm,
    Parameter,
    StackPlace,
    Tensor,
    in_one_tensor,
)
from checkpoint_convert.shape import ModelShape, MoeShape, Stacks


def mlp(shape: ModelShape, size: int, source: str, target: str) -> list[Parameter]:
    """An MLP of intermediate size `size`.

    `source` and `target` are name prefixes in weight files and in Megatron.
    """
    inward, names = (size, shape.hidden_size), ("gate", "up") if shape.has_gates else ("up",)
    down = Tensor(source + "down_proj.weight", inward[::-1])
    return [
        Parameter(
            target + "linear_fc1.weight",
            tuple(Tensor(f"{source}{name}_proj.weight", inward) for name in names),
            split=0,
            is_split_by_source=True,
            vllm=InVllm(name=f"{source}{'_'.join(names)}_proj.weight"),
        ),
        Parameter(target + "linear_fc2.weight", (down,), split=1),
    ]


def dense_mlp(shape: ModelShape, source: str, target: str) -> list[Parameter]:
    """The MLP of a layer without experts; prefixes are as in `mlp`."""
    gate_up, down = mlp(shape, shape.intermediate_size, source, target)
    if FAMILIES[shape.family].has_fused_weights:
        gate_up = replace(gate_up, sources=in_one_tensor(gate_up.vllm.name, gate_up.sources))
    return [gate_up, down]


ROUTER = "mlp.router.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
"""Bias added to the scores with which Megatron chooses experts, `e_score_correction_bias` in the
weight files. It is not trained."""


def moe_block(
    shape: ModelShape, moe: MoeShape, source: str, experts: range, *, grouped: bool
) -> list[Parameter]:
    """The router and the `experts` (global indices) of one layer that a rank holds.

    `source` is the layer's prefix in the weight files. `grouped`: Transformer Engine multiplies by
    all experts of a rank at once, and numbers their weights in one module.
    """
    names = FAMILIES[shape.family].experts
    assert names is not None, f"{shape.family} names no experts"
    block = f"{source}{names.block}."
    parameters = _router(shape, moe, names, block)
    if moe.has_shared_gate:
        gate = Tensor(f"{block}{names.shared}_gate.weight", (1, shape.hidden_size))
        parameters.append(Parameter("mlp.shared_experts.gate_weight", (gate,)))
    if moe.shared_intermediate_size:
        size = moe.shared_intermediate_size
        parameters += mlp(shape, size, f"{block}{names.shared}.", "mlp.shared_experts.")
    pattern = "mlp.experts.{}{}" if grouped else "mlp.experts.local_experts.{1}.{0}"
    kinds = ("weight", "bias") if shape.has_linear_biases else ("weight",)
    for local_index, index in enumerate(experts):
        for kind in kinds:
            targets = [pattern.format(f"{linear}.{kind}", local_index) for linear in EXPERT_LINEARS]
            parameters += _expert(shape, moe, names, f"{block}experts.", index, kind, targets)
    return parameters


def _router(shape: ModelShape, moe: MoeShape, names: Experts, source: str) -> list[Parameter]:
    """The router; with sigmoid scores also its bias per expert, which vLLM keeps in float32."""
    matrix = Parameter(
        ROUTER,
        (Tensor(f"{source}{names.router}.weight", (moe.num_experts, shape.hidden_size)),),
        vllm=InVllm(is_float32=FAMILIES[shape.family].engines.vllm.has_float32_router),
    )
    if shape.has_linear_biases:
        own = Tensor(f"{source}{names.router}.bias", (moe.num_experts,))
        return [matrix, Parameter("mlp.router.bias", (own,))]
    if moe.score_function == "softmax":
        return [matrix]
    bias = Tensor(source + names.bias, (moe.num_experts,), is_float32=True)
    return [matrix, Parameter(EXPERT_BIAS, (bias,), vllm=InVllm(is_float32=True))]


EXPERT_LINEARS = ("linear_fc1", "linear_fc2")
"""Linear layers of Megatron's experts."""


def _expert(
    shape: ModelShape,
    moe: MoeShape,
    names: Experts,
    source: str,
    index: int,
    kind: str,
    targets: list[str],
) -> list[Parameter]:
    """Weights or biases (`kind`) of expert `index` of a layer; `targets` are Megatron's names."""
    # A model has tens of thousands of experts: nothing here is computed twice.
    sizes, is_weight = (moe.intermediate_size, shape.hidden_size), kind == "weight"
    inward, outward = (sizes, sizes[::-1]) if is_weight else (sizes[:1], sizes[1:])
    firsts = (names.gate, names.up) if shape.has_gates else (names.up,)
    inner = tuple(Tensor(f"{source}{index}.{name}.{kind}", inward) for name in firsts)
    down = Tensor(f"{source}{index}.{names.down}.{kind}", outward)
    if moe.stacks is not None:
        end = "" if is_weight else "_bias"
        stack = _Stack(moe.stacks, index, moe.num_experts)
        inner = stack.halves(f"{source}gate_up_proj{end}", inner)
        down = stack.whole(f"{source}down_proj{end}", down)
    first, second = (f"mlp.experts.experts.{linear}.{kind}" for linear in EXPERT_LINEARS)
    stack_axes = ((index, moe.num_experts),)
    return [
        Parameter(
            targets[0],
            inner,
            split=0,
            is_split_by_source=True,
            is_expert=True,
            key=first,
            vllm=InVllm(
                name=f"{source}routed_experts.w13_{kind}", alternates=moe.stacks == "alternating"
            ),
            stack_axes=stack_axes,
        ),
        Parameter(
            targets[1],
            (down,),
            split=1 if is_weight else None,
            is_expert=True,
            key=second,
            vllm=InVllm(name=f"{source}routed_experts.w2_{kind}", is_added_once=not is_weight),
            stack_axes=stack_axes,
        ),
    ]


@dataclass(frozen=True)
class _Stack:
    """Expert `index` of the `size` experts of a layer in the tensors that stack them."""

    kind: Stacks
    index: int
    size: int

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Place a tensor in a stack with one tensor per expert (down)."""
        sizes, axes = tensor.shape, tuple(range(1, len(tensor.shape) + 1))
        if self.kind != "joined":  # matrices are transposed
            sizes, axes = sizes[::-1], axes[::-1]
        shape, start = (self.size, *sizes), (self.index, *(0 for _ in sizes))
        return replace(tensor, stack=StackPlace(name, shape, shape, start, axes))

    def halves(self, name: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Place two tensors in a stack that fuses them (gate and up), as halves or alternating."""
        rows, *columns = tensors[0].shape
        if self.kind == "alternating":
            # [experts, inputs, outputs, 2], where a tensor is [outputs, inputs]: axes in reverse.
            stored, shape = (self.size, *columns, 2 * rows), (self.size, *columns, rows, 2)
            axes, half = tuple(range(len(columns) + 1, 0, -1)), len(shape) - 1
        elif self.kind == "transposed":
            stored, shape = (self.size, *columns, 2 * rows), (self.size, *columns, 2, rows)
            # [experts, inputs, 2, outputs]: axes in reverse, but for the halves.
            half = len(columns) + 1
            axes = (half + 1, *range(len(columns), 0, -1))
        else:
            # [experts, 2, outputs, inputs]: axes in order.
            stored, shape = (self.size, 2 * rows, *columns), (self.size, 2, rows, *columns)
            axes, half = tuple(range(2, len(shape))), 1
        first = (self.index, *(0 for _ in shape[1:]))
        places = [
            StackPlace(name, stored, shape, (*first[:half], number, *first[half + 1 :]), axes)
            for number in range(2)
        ]
        return tuple(replace(x, stack=place) for x, place in zip(tensors, places, strict=True))
