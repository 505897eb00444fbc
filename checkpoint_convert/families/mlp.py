"""The gated MLP: of a dense layer, and of an expert that processes every token."""

from checkpoint_convert.families.description import Parameter, Tensor


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
