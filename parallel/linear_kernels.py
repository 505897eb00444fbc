"""Linear attention over packed sequences by Triton kernels of flash-linear-attention, on GPUs.

They replace the torch functions of `delta_rule` and `state_space`. Convolutions, decays and the
memories between chunks are in float32; factors of products, and outputs, in the model's dtype.
"""

from importlib import import_module, metadata
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from parallel.delta_rule import Stage

PACKAGE = "flash-linear-attention"
RELEASE = "0.6.0"
"""Release of `fla-core`: earlier ones have other modules, or refuse Hopper with torch's Triton."""


def has_kernels() -> bool:
    """Whether the kernels are installed (extra `hybrid`); ValueError for another release."""
    try:
        found = metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return False
    if found != RELEASE:
        raise ValueError(
            f"fla-core {found} is installed, but linear attention needs release {RELEASE}: "
            "pip install -e '.[hybrid]', or compute in torch with "
            "model.megatron.transformer_impl=local"
        )
    return True


def convolution(
    x: Tensor, weight: Tensor, stage: Stage, before: Tensor, bias: Tensor | None
) -> Tensor:
    """`delta_rule.activated_convolution` by a kernel."""
    state = None
    if stage.follows is not None:  # [n, channels, kernel size], the first token is never read
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
    """`delta_rule.gated_delta_rule` by a kernel; memories after runs that are followed, else None.

    `query` and `key` [T, groups, key size] may have any length: the kernel normalises them. Each
    serves heads / groups neighbouring heads.
    """
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
    """`state_space.state_space` by a kernel; memories [n, heads, key size, value size] after runs
    that are followed, else None.

    The host waits for the GPU once in each forward, and twice in each backward: the kernel reads
    the number of chunks.
    """
    # Linear attention with a decay per head. The kernel of mamba-ssm takes no memories before
    # packed sequences, and its package needs a CUDA compiler.
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
    """Cumulative lengths, also on the host, which would otherwise wait for them in every layer."""
    return {"cu_seqlens": stage.cu_seqlens, "cu_seqlens_cpu": stage.host_cu_seqlens}
