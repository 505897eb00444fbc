"""Multi-head latent attention: projections down to latents, their norms, and projections up; and
the indexer of sparse attention, which also reads the latent of queries."""

from checkpoint_convert.families.description import InVllm, Parameter, Tensor
from checkpoint_convert.shape import IndexerShape, LatentShape, ModelShape

INDEXER = "self_attention.indexer."
"""Prefix of the parameters of an indexer, which are not trained."""
KEY_NORM = tuple(f"{INDEXER}k_norm.{kind}" for kind in ("weight", "bias"))
"""Parameters that are float32 in a model of any dtype."""


def mla_attention(
    shape: ModelShape,
    latent: LatentShape,
    source: str,
    target: str,
    *,
    transformer_engine: bool,
) -> list[Parameter]:
    """The attention of a layer; prefixes and norms are as in `decoder.layer`.

    Latents are not split: every tensor rank computes them, and projects them up to its heads. The
    part of keys that RoPE rotates is computed with the latent of keys and values, the rest of keys
    with values.
    """
    heads, hidden = shape.num_attention_heads, shape.hidden_size
    query_rank, kv_rows = latent.query_rank or 0, latent.rank + latent.rotary_dim
    query_rows = heads * shape.head_dim
    key_value_rows = heads * (shape.head_dim - latent.rotary_dim + latent.value_dim)

    def down(x: str, name: str, rows: int, first_row: int) -> Parameter:
        """Projection to a latent; engines fuse the two, and this one begins at `first_row`."""
        weight = Tensor(f"{source}{name}.weight", (rows, hidden))
        fused = InVllm(
            name=source + "fused_qkv_a_proj.weight", rows=(first_row, query_rank + kv_rows)
        )
        return Parameter(
            f"{target}linear_{x}_down_proj.weight",
            (weight,),
            vllm=fused if query_rank else InVllm(),
        )

    def up(x: str, rows: int, rank: int) -> list[Parameter]:
        norm = Tensor(f"{source}{x}_a_layernorm.weight", (rank,))
        fused = f"{target}linear_{x}_up_proj.layer_norm_weight"
        own = f"{target}{x}_layernorm.weight"
        weight = Tensor(f"{source}{x}_b_proj.weight", (rows, rank))
        return [
            Parameter(fused if transformer_engine else own, (norm,), key=fused),
            Parameter(f"{target}linear_{x}_up_proj.weight", (weight,), split=0),
        ]

    if query_rank:
        queries = [down("q", "q_a_proj", query_rank, 0), *up("q", query_rows, query_rank)]
    else:
        whole = Tensor(source + "q_proj.weight", (query_rows, hidden))
        queries = [Parameter(target + "linear_q_proj.weight", (whole,), split=0)]
    output = Tensor(source + "o_proj.weight", (hidden, heads * latent.value_dim))
    return [
        Parameter(target + "linear_proj.weight", (output,), split=1),
        *queries,
        down("kv", "kv_a_proj_with_mqa", kv_rows, query_rank),
        *up("kv", key_value_rows, latent.rank),
        *(
            _indexer(shape, shape.indexer, query_rank, f"{source}indexer.", f"{target}indexer.")
            if shape.indexer
            else []
        ),
    ]


def _indexer(
    shape: ModelShape, indexer: IndexerShape, query_rank: int, source: str, target: str
) -> list[Parameter]:
    """Parameters of the indexer; every tensor rank and every worker of an engine holds all of them.

    An engine fuses the projections to keys and to weights of heads, and keeps the norm of keys in
    float32.
    """
    keys, heads, hidden = indexer.head_dim, indexer.num_heads, shape.hidden_size

    def of_hidden(name: str, rows: int, first_row: int) -> Parameter:
        return Parameter(
            f"{target}{name}.weight",
            (Tensor(f"{source}{name}.weight", (rows, hidden)),),
            vllm=InVllm(name=f"{source}wk_weights_proj.weight", rows=(first_row, keys + heads)),
        )

    queries = Tensor(f"{source}wq_b.weight", (heads * keys, query_rank))
    return [
        Parameter(f"{target}wq_b.weight", (queries,)),
        of_hidden("wk", keys, 0),
        of_hidden("weights_proj", heads, keys),
        *(
            Parameter(
                f"{target}k_norm.{kind}",
                (Tensor(f"{source}k_norm.{kind}", (keys,), is_float32=True),),
                vllm=InVllm(is_float32=True),
            )
            for kind in ("weight", "bias")
        ),
    ]
