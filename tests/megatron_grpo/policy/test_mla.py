"""Latent attention, as far as it needs no Transformer Engine."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy import attention
from parallel import ParallelDims
from parallel.attention import PackedAttention


def options_of_core_attention(rank: int, folder: Path) -> list[set[str]]:
    """Names of the options that each layer gives to its core attention."""
    seen: list[set[str]] = []

    class Recorded(PackedAttention):
        def __init__(self, **options: Any) -> None:
            seen.append(set(options))
            super().__init__(**options)

    attention.PackedAttention = Recorded
    start_policy(rank, folder, ParallelDims())
    return seen


def test_core_attention_gets_only_options_that_transformer_engines_takes(tmp_path: Path) -> None:
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
    # The base class builds one, too, which is replaced: it knows what to pass.
    ours = [options for options in seen if "k_channels" in options]
    assert ours and all(options <= {each.arg for each in init.args.args} for options in ours)
