"""A mixture of experts in place of an MLP: a router and gated experts."""

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import Experts, Parameter, Tensor
from checkpoint_convert.shape import ModelShape, MoeShape


def mixture(
    shape: ModelShape, moe: MoeShape, source: str, experts: range, *, grouped: bool
) -> list[Parameter]:
    """The router and the `experts` (global indices) of one layer that a rank holds.

    `source` is the layer's prefix in the weight files. `grouped`: Transformer Engine multiplies by
    all experts of a rank at once, and numbers their weights in one module.
    """
    names = FAMILIES[shape.family].experts
    assert names is not None, f"{shape.family} names no experts"
    block = f"{source}{names.block}."
    router = Tensor(block + "gate.weight", (moe.num_experts, shape.hidden_size))
    parameters = [Parameter("mlp.router.weight", (router,))]
    for local_index, index in enumerate(experts):
        for parameter in _expert(shape, moe, names, f"{block}experts.", index):
            linear = parameter.name
            name = (
                f"mlp.experts.{linear}{local_index}"
                if grouped
                else f"mlp.experts.local_experts.{local_index}.{linear}"
            )
            key = f"mlp.experts.experts.{linear}"
            parameters.append(parameter.stored_as(name, key, index, moe.num_experts))
    return parameters


def _expert(
    shape: ModelShape, moe: MoeShape, names: Experts, source: str, index: int
) -> list[Parameter]:
    inward = (moe.intermediate_size, shape.hidden_size)
    gate, up = (Tensor(f"{source}{index}.{name}.weight", inward) for name in (names.gate, names.up))
    down = Tensor(f"{source}{index}.{names.down}.weight", inward[::-1])
    return [
        Parameter(
            "linear_fc1.weight",
            (gate, up),
            split=0,
            is_split_by_source=True,
            is_expert=True,
            engine_name=source + "routed_experts.w13_weight",
        ),
        Parameter(
            "linear_fc2.weight",
            (down,),
            split=1,
            is_expert=True,
            engine_name=source + "routed_experts.w2_weight",
        ),
    ]
