"""Sparse attention in config.json: the indexer that chooses which tokens a token attends to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.config_values import integer
from checkpoint_convert.families.description import Family
from checkpoint_convert.shape import IndexerShape, LatentShape

# What lists of transformers' config have for every layer.
_LAYERS = {"layer_types": "indexed_attention", "indexer_types": "full"}


def read_indexer(
    path: Path, values: Mapping[str, Any], family: Family, latent: LatentShape | None
) -> IndexerShape | None:
    """The indexer of every layer; None: attention is not sparse.

    Raises ValueError for a layer without one, and for sizes that do not go together.
    """
    if family.indexer_pairs is None:
        return None
    num_layers = integer(path, values, "num_hidden_layers")
    for key, kind in _LAYERS.items():
        kinds = values.get(key)
        if kinds and kinds != [kind] * num_layers:
            raise ValueError(f"{path}: {key} must have {kind!r} for every layer, or be absent")
    if latent is None or latent.query_rank is None:
        raise ValueError(f"{path}: q_lora_rank is null; indexers need a latent of queries")
    head_dim = integer(path, values, "index_head_dim")
    if head_dim < latent.rotary_dim:
        raise ValueError(
            f"{path}: index_head_dim({head_dim}) must be at least "
            f"qk_rope_head_dim({latent.rotary_dim}), the part of it that RoPE rotates"
        )
    return IndexerShape(
        topk=integer(path, values, "index_topk"),
        num_heads=integer(path, values, "index_n_heads"),
        head_dim=head_dim,
        has_neighbouring_pairs=family.indexer_pairs == "neighbours",
    )
