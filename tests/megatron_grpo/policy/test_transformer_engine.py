"""Checks of Transformer Engine on hosts that do not have it."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy import attention
from megatron_grpo.policy.transformer_engine import check_cudnn
from parallel import ParallelDims
from parallel.attention import PackedAttention


def test_check_cudnn_refuses_wrong_gradients_on_hopper():
    with pytest.raises(
        ValueError, match=r"cuDNN 9\.14\.0.* 9\.18 is the first right one.* remove the system"
    ):
        check_cudnn((9, 0), (9, 14, 0))
    check_cudnn((9, 0), (9, 18, 0))
    check_cudnn((10, 0), (9, 14, 0))


def options_of_core_attention(rank: int, folder: Path) -> list[set[str]]:
    """Names of the options of each core attention that layers build."""
    seen: list[set[str]] = []

    class Recorded(PackedAttention):
        def __init__(self, **options: Any) -> None:
            seen.append(set(options))
            super().__init__(**options)

    attention.PackedAttention = Recorded
    start_policy(rank, folder, ParallelDims())
    return seen


def test_latent_attention_passes_options_that_transformer_engine_takes(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "deepseek_v3")
    [seen] = run_ranks(1, options_of_core_attention, folder)
    spec = find_spec("megatron.core.extensions.transformer_engine")
    assert spec and spec.origin
    [module] = [
        node
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "TEDotProductAttention"
    ]
    [init] = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    # Drop the base class's own core attention, which ours replaces: it has no `k_channels`.
    ours = [options for options in seen if "k_channels" in options]
    assert ours and all(options <= {each.arg for each in init.args.args} for options in ours)
