"""Low-rank adapters as PEFT stores them: the names and shapes of their tensors."""

from collections.abc import Iterable, Mapping

from parallel import Shape

PEFT_PREFIX = "base_model.model."
"""Of the names of an adapter's tensors; the rest begins with that of a module of the model."""
WEIGHT = ".weight"


def a_name(module: str) -> str:
    """The name of A [r, in] of a module such as ``model.layers.0.mlp.up_proj``."""
    return f"{PEFT_PREFIX}{module}.lora_A.weight"


def b_name(module: str) -> str:
    """The name of B [out, r] of a module."""
    return f"{PEFT_PREFIX}{module}.lora_B.weight"


def weight_of(tensor: str) -> str:
    """The weight that one of PEFT's tensors belongs to; of a weight, itself."""
    name = tensor.removeprefix(PEFT_PREFIX)
    return name.replace(".lora_A.", ".").replace(".lora_B.", ".")


def adapter_tensors(
    modules: Iterable[str], rank: int, weights: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Name and shape of every tensor of adapters of `rank`; `weights` are those of the model."""
    return {
        name: size
        for module in modules
        for name, size in {
            a_name(module): (rank, weights[module + WEIGHT][1]),
            b_name(module): (weights[module + WEIGHT][0], rank),
        }.items()
    }
