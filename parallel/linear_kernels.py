"""Linear attention over packed sequences by Triton kernels of flash-linear-attention, on GPUs.

They compute what `delta_rule` and `state_space` compute in torch. Convolutions, decays and memories
from chunk to chunk are in float32; what they multiply, and outputs, are in the dtype of the model.
"""

from importlib import import_module, metadata
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from parallel.delta_rule import Stage

PACKAGE = "flash-linear-attention"
RELEASE = "0.6.0"
"""Release of `fla-core`: earlier ones have other modules, or refuse Hopper with Triton of this
torch."""


def has_kernels() -> bool:
    """Whether the kernels are installed (extra `hybrid`); ValueError if those of another release
    are."""
    try:
        found = metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return False
    if found != RELEASE:
        raise ValueError(
            f"fla-core {found} is installed, and linear attention has the kernels of {RELEASE}: "
            "pip install -e '.[hybrid]', or compute in torch with "
            "model.megatron.transformer_impl=local"
        )
    return True


def convolution(
    x: Tensor, weight: Tensor, stage: Stage, before: Tensor, bias: Tensor | None
) -> Tensor:
    """`delta_rule.activated_convolution` by a kernel."""
    state = None
    if stage.follows is not None:  # one token more than the kernel reads, and tokens last
        state = pad(before, (0, 0, 1, 0)).transpose(1, 2).contiguous()
    mixed: Tensor = import_module("fla.modules.causal_conv1d").causal_conv1d(
        x.unsqueeze(0), weight, bias, initial_state=state, activation="silu", **_sequences(stage)
    )[0]
    return mixed.squeeze(0)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    stage: Stage,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule.gated_delta_rule` by a kernel, of queries and keys [T, groups, size of a key] of
    any length, each of as many neighbouring heads; the memories after runs that are followed."""
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    read, memory = rule(
        *(x.unsqueeze(0) for x in (query, key, value, decay, strength)),
        initial_state=memory,
        output_final_state=stage.is_followed,
        use_qk_l2norm_in_kernel=True,
        **_sequences(stage),
    )
    return read.squeeze(0), memory


def state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    stage: Stage,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`state_space.state_space` by a kernel; memories [n, heads, size of a key, size of a value]
    are those after runs that are followed.

    It is one of linear attention with a decay per head, as that of mamba-ssm has no memories before
    packed sequences, and its package needs a compiler for CUDA. The host waits for the GPU once in
    each forward, and twice in each backward: the kernel reads the number of chunks.
    """
    heads = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(heads, dim=1) for x in (query, key))
    read, memory = import_module("fla.ops.simple_gla").chunk_simple_gla(
        *(x.unsqueeze(0) for x in (query, key, value, decay)),
        scale=1.0,
        initial_state=memory,
        output_final_state=stage.is_followed,
        **_sequences(stage),
    )
    return read.squeeze(0), memory


def _sequences(stage: Stage) -> dict[str, Any]:
    """With the lengths on the host, which would wait for them in every layer."""
    return {"cu_seqlens": stage.cu_seqlens, "cu_seqlens_cpu": stage.host_cu_seqlens}
