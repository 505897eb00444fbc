"""Linear attention: see `LinearShape`."""

from collections.abc import Sequence
from functools import partial

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import InVllm, Parameter, Tensor, in_one_tensor
from checkpoint_convert.shape import LinearShape, ModelShape


def linear_attention(
    shape: ModelShape, linear: LinearShape, source: str, target: str
) -> list[Parameter]:
    """Parameters of the gated delta rule; prefixes are `source` in files, `target` in Megatron.

    Ranks split key heads, each with its value heads. For each key head come, one after the other,
    the projections to queries, keys, values, output gates, strengths of updates (beta) and decays
    (alpha). The convolution has the rows of the first three.
    """
    num_heads, hidden = linear.num_value_heads, shape.hidden_size
    keys, values = linear.num_key_heads * linear.key_dim, num_heads * linear.value_dim
    fused, rates, conv = (f"{source}{x}.weight" for x in ("in_proj_qkvz", "in_proj_ba", "conv1d"))
    if FAMILIES[shape.family].linear == "by head":
        # Already grouped by key head, in Megatron-Core's order: one source each.
        qkvz: tuple[Tensor, ...] = (Tensor(fused, (2 * (keys + values), hidden)),)
        ba: tuple[Tensor, ...] = (Tensor(rates, (2 * num_heads, hidden)),)
    else:
        name = f"{source}in_proj_qkv.weight"
        qkv = in_one_tensor(name, [Tensor(name, (size, hidden)) for size in (keys, keys, values)])
        qkvz = (*qkv, Tensor(f"{source}in_proj_z.weight", (values, hidden)))
        ba = tuple(Tensor(f"{source}in_proj_{x}.weight", (num_heads, hidden)) for x in "ba")
    # Depthwise convolution: weights are [channels, 1, width].
    kernel = (1, linear.kernel_size)
    mixed = in_one_tensor(conv, [Tensor(conv, (size, *kernel)) for size in (keys, keys, values)])
    by_head = partial(Parameter, split=0, interleave_groups=linear.num_key_heads)
    return [
        by_head(f"{target}conv1d_weight", mixed, vllm=InVllm(name=conv)),
        Parameter(f"{target}dt_bias", (Tensor(f"{source}dt_bias", (num_heads,)),), split=0),
        Parameter(
            f"{target}A_log",
            (Tensor(f"{source}A_log", (num_heads,)),),
            split=0,
            vllm=InVllm(is_float32=True),
        ),
        Parameter(
            f"{target}out_norm_weight", (Tensor(f"{source}norm.weight", (linear.value_dim,)),)
        ),
        by_head(
            f"{target}in_proj.weight",
            (*qkvz, *ba),
            vllm=InVllm(parts=((fused, len(qkvz)), (rates, len(ba)))),
        ),
        Parameter(
            f"{target}out_proj.weight",
            (Tensor(f"{source}out_proj.weight", (hidden, values)),),
            split=1,
        ),
    ]


A_LOG = "A_log"
"""Parameter of Mamba-2 that a vLLM engine holds as -exp(value)."""


def mamba(shape: ModelShape, linear: LinearShape, source: str, target: str) -> list[Parameter]:
    """Parameters of Mamba-2; prefixes are as in `linear_attention`.

    Ranks split groups, each with its heads. For each group come, one after the other, the
    projections to gates, x, B, C and steps. The convolution has the rows of x, B and C.
    """
    groups, num_heads, hidden = linear.num_key_heads, linear.num_value_heads, shape.hidden_size
    states, values = groups * linear.key_dim, num_heads * linear.value_dim

    def fused(name: str, sizes: Sequence[int], *columns: int) -> Parameter:
        """Parameter with sources that the files also store as rows of one tensor."""
        stored = f"{source}{name}"
        parts = in_one_tensor(stored, [Tensor(stored, (size, *columns)) for size in sizes])
        own = target + name.replace("conv1d.", "conv1d_")
        vllm = InVllm(name=stored)
        return Parameter(own, parts, split=0, interleave_groups=groups, vllm=vllm)

    def by_row(name: str, stored: str, size: int, *, is_float32: bool = False) -> Parameter:
        sources = (Tensor(source + stored, (size,)),)
        return Parameter(target + name, sources, split=0, vllm=InVllm(is_float32=is_float32))

    output = Tensor(f"{source}out_proj.weight", (hidden, values))
    return [
        fused("conv1d.weight", (values, states, states), 1, linear.kernel_size),
        fused("conv1d.bias", (values, states, states)),
        by_row("dt_bias", "dt_bias", num_heads),
        by_row("A_log", A_LOG, num_heads, is_float32=True),
        by_row("D", "D", num_heads),
        by_row("out_norm_weight", "norm.weight", values),
        fused("in_proj.weight", (values, values, states, states, num_heads), hidden),
        Parameter(f"{target}out_proj.weight", (output,), split=1),
    ]
