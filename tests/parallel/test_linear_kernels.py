"""Kernels of linear attention: release and arguments; `tests/gpu` compares their results."""

import inspect
from importlib import import_module, metadata

import pytest

from parallel.linear_kernels import RELEASE, has_kernels


def test_only_the_known_release_counts_as_kernels(monkeypatch):
    releases = iter([RELEASE, "0.5.2"])
    monkeypatch.setattr(metadata, "version", lambda name: next(releases))
    assert has_kernels()
    with pytest.raises(ValueError, match=r"fla-core 0.5.2 is installed, .* pip install"):
        has_kernels()


@pytest.mark.skipif(not has_kernels(), reason="needs `pip install -e '.[hybrid]'`")
def test_linear_kernels_have_the_arguments_that_are_given():
    """Every argument must be named in the signature: `**kwargs` would take any name."""
    common = {"initial_state", "cu_seqlens", "cu_seqlens_cpu"}
    for module, name, own in (
        ("fla.modules.causal_conv1d", "causal_conv1d", {"activation"}),
        (
            "fla.ops.gated_delta_rule",
            "chunk_gated_delta_rule",
            {"output_final_state", "use_qk_l2norm_in_kernel"},
        ),
        ("fla.ops.simple_gla", "chunk_simple_gla", {"output_final_state", "scale"}),
    ):
        function = getattr(import_module(module), name)
        assert common | own <= {*inspect.signature(function).parameters}
