"""The feed-forward part of a layer: a gated MLP, or a mixture of experts in its place.

A mixture has a router, gated experts and perhaps a shared expert, which processes every token.
"""

from dataclasses import replace

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import (
    Experts,
    Parameter,
    StackPlace,
    Tensor,
    in_one_tensor,
)
from checkpoint_convert.shape import ModelShape, MoeShape


def gated_mlp(inward: tuple[int, int], source: str, target: str) -> list[Parameter]:
    """`inward` is the shape of the gate: intermediate size and hidden size.

    `source` and `target` are name prefixes in weight files and in Megatron.
    """
    gate, up = (Tensor(f"{source}{name}_proj.weight", inward) for name in ("gate", "up"))
    down = Tensor(source + "down_proj.weight", inward[::-1])
    return [
        Parameter(
            target + "linear_fc1.weight",
            (gate, up),
            split=0,
            is_split_by_source=True,
            engine_name=source + "gate_up_proj.weight",
        ),
        Parameter(target + "linear_fc2.weight", (down,), split=1),
    ]


def dense_mlp(shape: ModelShape, source: str, target: str) -> list[Parameter]:
    """The MLP of a layer without experts; prefixes are as in `gated_mlp`."""
    gate_up, down = gated_mlp((shape.intermediate_size, shape.hidden_size), source, target)
    if FAMILIES[shape.family].has_fused_weights:
        gate_up = replace(gate_up, sources=in_one_tensor(gate_up.engine_name, gate_up.sources))
    return [gate_up, down]


ROUTER = "mlp.router.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
"""What Megatron adds to the scores by which it chooses experts, `e_score_correction_bias` in the
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
        parameters += gated_mlp(
            (moe.shared_intermediate_size, shape.hidden_size),
            f"{block}{names.shared}.",
            "mlp.shared_experts.",
        )
    pattern = "mlp.experts.{}{}" if grouped else "mlp.experts.local_experts.{1}.{0}"
    kinds = ("weight", "bias") if shape.has_linear_biases else ("weight",)
    for local_index, index in enumerate(experts):
        for kind in kinds:
            targets = [pattern.format(f"{linear}.{kind}", local_index) for linear in EXPERT_LINEARS]
            parameters += _expert(shape, moe, names, f"{block}experts.", index, kind, targets)
    return parameters


def _router(shape: ModelShape, moe: MoeShape, names: Experts, source: str) -> list[Parameter]:
    """One that scores by a sigmoid has a bias for each expert, which vLLM keeps in float32."""
    matrix = Parameter(
        ROUTER,
        (Tensor(f"{source}{names.router}.weight", (moe.num_experts, shape.hidden_size)),),
        is_float32_in_engine=names.is_router_float32_in_engine,
    )
    if shape.has_linear_biases:
        own = Tensor(f"{source}{names.router}.bias", (moe.num_experts,))
        return [matrix, Parameter("mlp.router.bias", (own,))]
    if moe.score_function == "softmax":
        return [matrix]
    bias = Tensor(source + names.bias, (moe.num_experts,), is_float32=True)
    return [matrix, Parameter(EXPERT_BIAS, (bias,), is_float32_in_engine=True)]


EXPERT_LINEARS = ("linear_fc1", "linear_fc2")
"""Of Megatron's experts."""


def _expert(
    shape: ModelShape,
    moe: MoeShape,
    names: Experts,
    source: str,
    index: int,
    kind: str,
    targets: list[str],
) -> list[Parameter]:
    """The weights or biases (`kind`) of expert `index` of a layer; `targets` are their names in
    Megatron.

    A model has tens of thousands: nothing is made twice.
    """
    sizes, is_weight = (moe.intermediate_size, shape.hidden_size), kind == "weight"
    inward, outward = (sizes, sizes[::-1]) if is_weight else (sizes[:1], sizes[1:])
    gate, up = (Tensor(f"{source}{index}.{name}.{kind}", inward) for name in (names.gate, names.up))
    down = Tensor(f"{source}{index}.{names.down}.{kind}", outward)
    if names.are_stacked:
        end = "" if is_weight else "_bias"
        gate, up = _alternating(f"{source}gate_up_proj{end}", (gate, up), index, moe.num_experts)
        down = _stacked(f"{source}down_proj{end}", down, index, moe.num_experts)
    first, second = (f"mlp.experts.experts.{linear}.{kind}" for linear in EXPERT_LINEARS)
    stack_axes = ((index, moe.num_experts),)
    return [
        Parameter(
            targets[0],
            (gate, up),
            split=0,
            is_split_by_source=True,
            is_expert=True,
            key=first,
            engine_name=f"{source}routed_experts.w13_{kind}",
            alternates_in_engine=names.are_stacked,
            stack_axes=stack_axes,
        ),
        Parameter(
            targets[1],
            (down,),
            split=1 if is_weight else None,
            is_expert=True,
            key=second,
            engine_name=f"{source}routed_experts.w2_{kind}",
            is_added_once_in_engine=not is_weight,
            stack_axes=stack_axes,
        ),
    ]


def _stacked(name: str, tensor: Tensor, index: int, size: int) -> Tensor:
    """Number `index` of a stack of `size`, which has matrices transposed."""
    shape, num_dims = (size, *tensor.shape[::-1]), len(tensor.shape)
    start = (index, *(0 for _ in tensor.shape))
    place = StackPlace(name, shape, shape, start, axes=tuple(range(num_dims, 0, -1)))
    return replace(tensor, stack=place)


def _alternating(
    name: str, tensors: tuple[Tensor, Tensor], index: int, size: int
) -> tuple[Tensor, ...]:
    """The same of two tensors whose rows alternate there."""
    rows, *columns = tensors[0].shape
    stored, shape = (size, *columns, 2 * rows), (size, *columns, rows, 2)
    axes = tuple(range(len(columns) + 1, 0, -1))
    starts = ((index, *(0 for _ in tensors[0].shape), number) for number in (0, 1))
    places = [StackPlace(name, stored, shape, start, axes) for start in starts]
    return tuple(replace(x, stack=place) for x, place in zip(tensors, places, strict=True))
