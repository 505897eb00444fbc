"""Kernels in torch for engines on CPUs, so that tests can run models that are not dense.

A plugin of vLLM and of SGLang, as any user may install one: both find its metadata, in the folder
`plugin`, on the path of modules. Engines on GPUs stay as they are.
"""


def in_vllm() -> None:
    """Let layers of a vLLM for CPUs compute by torch."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from engines_on_cpu.vllm_layers import compute_by_torch

        compute_by_torch()


def in_sglang() -> None:
    """Let layers of an SGLang for CPUs compute by torch."""
    from sglang.srt.utils import is_cpu

    if is_cpu():
        from engines_on_cpu import sglang_attention, sglang_matrices

        sglang_attention.attend_by_torch()
        sglang_matrices.multiply_by_torch()
