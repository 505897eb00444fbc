"""The pre-norm decoder that all families share: RoPE, GQA, gated MLP or experts, RMS norms.

Each function describes parameters of Megatron-Core in terms of the tensors of the weight files. An
engine fuses the same tensors in the same way under other names, but splits them by its own rules.
"""

from dataclasses import replace

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import InVllm, Parameter, Tensor, in_one_tensor
from checkpoint_convert.families.ffn import dense_mlp, moe_block
from checkpoint_convert.families.linear import linear_attention, mamba
from checkpoint_convert.families.mla import mla_attention
from checkpoint_convert.shape import ModelShape

ATTENTION_NORM = "input_layernorm.weight"
MLP_NORM = "pre_mlp_layernorm.weight"
# Transformer Engine fuses a norm into the linear layer that alone reads its output.
LINEAR_NORM = "self_attention.in_proj.layer_norm_weight"
QKV_NORM = "self_attention.linear_qkv.layer_norm_weight"
FC1_NORM = "mlp.linear_fc1.layer_norm_weight"
SINKS = "core_attention.softmax_offset"
POST_ATTENTION, POST_MLP = "self_attn_bda.norm.weight", "mlp_bda.norm.weight"


EMBEDDING, LAYERS, LAST_NORM = "model.embed_tokens", "model.layers", "model.norm"
"""The usual names in weight files; see `Family.file_names`."""


def _stored(shape: ModelShape, name: str) -> str:
    return FAMILIES[shape.family].file_names.get(name, name)


def layer_prefix(shape: ModelShape, index: int) -> str:
    """Prefix of a layer's tensors in weight files, such as ``model.layers.3.``."""
    return f"{_stored(shape, LAYERS)}.{index}."


def embedding(shape: ModelShape, padded_vocab: int) -> list[Parameter]:
    """Parameters of the first pipeline stage only; the embedding has `padded_vocab` rows."""
    table = Tensor(f"{_stored(shape, EMBEDDING)}.weight", (shape.vocab_size, shape.hidden_size))
    zero_rows = padded_vocab - shape.vocab_size
    return [
        Parameter("embedding.word_embeddings.weight", (table,), split=0, zero_rows=zero_rows),
    ]


def head(shape: ModelShape, padded_vocab: int, *, shares_embedding: bool) -> list[Parameter]:
    """Parameters of the last pipeline stage only.

    A tied head is not a parameter when the same stage holds the embedding (`shares_embedding`);
    otherwise it is a copy of the embedding.
    """
    norm = Tensor(f"{_stored(shape, LAST_NORM)}.weight", (shape.hidden_size,))
    parameters = [Parameter("decoder.final_layernorm.weight", (norm,))]
    if not (shape.tie_word_embeddings and shares_embedding):
        tied = shape.tie_word_embeddings
        name = f"{_stored(shape, EMBEDDING) if tied else 'lm_head'}.weight"
        table = Tensor(name, (shape.vocab_size, shape.hidden_size))
        zero_rows = padded_vocab - shape.vocab_size
        parameters.append(
            Parameter("output_layer.weight", (table,), split=0, zero_rows=zero_rows, is_copy=tied)
        )
    return parameters


def layer(
    shape: ModelShape,
    index: int,
    experts: range,
    *,
    transformer_engine: bool,
    source: str | None = None,
) -> list[Parameter]:
    """Layer `index` of the model with the given `experts`; names lack the layer's prefix.

    `source` is its prefix in weight files, by default `layer_prefix`. Transformer Engine keeps a
    norm in the linear layer that follows it, except where several layers read the normalised
    states: before experts and before latent attention. Checkpoints use its names of norms.
    """
    source = source or layer_prefix(shape, index)
    if shape.block_types:
        return _block(shape, index, experts, source, transformer_engine=transformer_engine)

    def norm(own: str, fused: str, name: str) -> Parameter:
        weight = Tensor(f"{source}{name}.weight", (shape.hidden_size,))
        return Parameter(fused if transformer_engine else own, (weight,), key=fused)

    if shape.linear is not None and index in shape.linear_layers:
        before_attention = LINEAR_NORM
        attention = linear_attention(
            shape, shape.linear, source + "linear_attn.", "self_attention."
        )
    elif shape.latent is None:
        before_attention = QKV_NORM
        attention = fused_attention(shape, source + "self_attn.", "self_attention.")
    else:
        before_attention = ATTENTION_NORM
        attention = mla_attention(
            shape,
            shape.latent,
            source + "self_attn.",
            "self_attention.",
            transformer_engine=transformer_engine,
        )
    moe = shape.moe if "moe" in shape.modules(index) else None
    before_mlp = FC1_NORM if moe is None else MLP_NORM
    of_attention, of_mlp = [], []
    if shape.has_pre_norms:
        # In files, post_attention_layernorm precedes the MLP, or with post norms follows attention.
        name = "pre_feedforward_layernorm" if shape.has_post_norms else "post_attention_layernorm"
        of_attention.append(norm(ATTENTION_NORM, before_attention, "input_layernorm"))
        of_mlp.append(norm(MLP_NORM, before_mlp, name))
    if shape.has_post_norms:
        of_attention.append(norm(POST_ATTENTION, POST_ATTENTION, "post_attention_layernorm"))
        of_mlp.append(norm(POST_MLP, POST_MLP, "post_feedforward_layernorm"))
    return [
        *of_attention,
        *attention,
        *of_mlp,
        *(
            dense_mlp(shape, source + "mlp.", "mlp.")
            if moe is None
            else moe_block(shape, moe, source, experts, grouped=transformer_engine)
        ),
    ]


def _block(
    shape: ModelShape, index: int, experts: range, source: str, *, transformer_engine: bool
) -> list[Parameter]:
    """A layer with one module, behind a norm; see `layer`."""
    (kind,), mixer, attention = shape.modules(index), f"{source}mixer.", "self_attention."
    if kind == "linear":
        assert shape.linear is not None
        own, fused = ATTENTION_NORM, LINEAR_NORM
        module = mamba(shape, shape.linear, mixer, attention)
    elif kind == "attention":
        own, fused = ATTENTION_NORM, QKV_NORM
        module = fused_attention(shape, mixer, attention)
    elif kind == "mlp":
        own, fused = MLP_NORM, FC1_NORM
        module = dense_mlp(shape, mixer, "mlp.")
    else:
        assert shape.moe is not None
        own = fused = MLP_NORM
        module = moe_block(shape, shape.moe, source, experts, grouped=transformer_engine)
    weight = Tensor(f"{source}norm.weight", (shape.hidden_size,))
    return [Parameter(fused if transformer_engine else own, (weight,), key=fused), *module]


MTP_LAYER = "mtp.layers.0."
"""Prefix of the first layer for multi-token prediction in Megatron-Core."""


def mtp_layer(shape: ModelShape, experts: range, *, transformer_engine: bool) -> list[Parameter]:
    """The layer for multi-token prediction, behind the last; parameters of the last stage only."""
    is_apart, hidden = FAMILIES[shape.family].mtp.is_apart, shape.hidden_size
    if is_apart:
        source, of_layer = "mtp.", "mtp.layers.0."
        stored = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    else:
        source = of_layer = f"model.layers.{shape.num_layers}."
        stored = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    sizes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    sizes["final_layernorm"] = (hidden,)
    own = [
        Parameter(
            f"{MTP_LAYER}{name}.weight",
            (Tensor(f"{source}{own_name}.weight", size),),
            # vLLM's Qwen3NextMTP and Qwen3_5MTP split this projection (ColumnParallelLinear); its
            # DeepSeek and GLM classes have a plain nn.Linear.
            vllm=InVllm(split=0 if is_apart and name == "eh_proj" else None),
        )
        for (name, size), own_name in zip(sizes.items(), stored, strict=True)
    ]
    if shape.moe is not None:
        # Weight files may stack the experts of layers but not these, as some of Qwen3.5's do.
        shape = replace(shape, moe=replace(shape.moe, stacks=shape.moe.mtp_stacks))
    inner = layer(
        # An index behind the last layer: attention, not linear attention, and experts if any.
        *(shape, shape.num_layers, experts),
        transformer_engine=transformer_engine,
        source=of_layer,
    )
    return [*own, *(each.under(f"{MTP_LAYER}transformer_layer.") for each in inner)]


def fused_attention(shape: ModelShape, source: str, target: str) -> list[Parameter]:
    """Attention with one projection of hidden states to queries, keys and values.

    `source` and `target` are name prefixes in weight files and in Megatron.
    """
    family, groups, hidden = FAMILIES[shape.family], shape.num_key_value_heads, shape.hidden_size
    query, key_value = shape.num_attention_heads * shape.head_dim, groups * shape.head_dim
    queries = query * (1 + shape.has_output_gate)  # gates follow the queries of each head
    rows = {"q": (queries, None), "k": (key_value, groups), "v": (key_value, groups)}

    def qkv(kind: str, *columns: int) -> Parameter:
        fused = f"{source}qkv_proj.{kind}"
        sources = tuple(
            Tensor(f"{source}{x}_proj.{kind}", (size, *columns), num_heads)
            for x, (size, num_heads) in rows.items()
        )
        return Parameter(
            f"{target}linear_qkv.{kind}",
            in_one_tensor(fused, sources) if family.has_fused_weights else sources,
            split=0,
            interleave_groups=groups,
            vllm=InVllm(name=fused),
        )

    output = Tensor(source + "o_proj.weight", (hidden, query))
    parameters = [
        qkv("weight", hidden),
        Parameter(target + "linear_proj.weight", (output,), split=1),
    ]
    if shape.attention_bias:
        parameters.append(qkv("bias"))
    if shape.has_output_bias:
        bias = Tensor(source + "o_proj.bias", (hidden,))
        parameters.append(Parameter(target + "linear_proj.bias", (bias,)))
    if shape.has_sinks:
        sinks = Tensor(source + "sinks", (shape.num_attention_heads,))
        parameters.append(Parameter(target + SINKS, (sinks,), split=0))
    if shape.qk_norm:
        for x in "qk":
            size = rows[x][0] if shape.norms_all_heads else shape.head_dim
            norm = Tensor(f"{source}{x}_norm.weight", (size,), rows[x][1])
            own = InVllm(split=0 if family.engines.vllm.has_split_norms else None)
            parameters.append(Parameter(f"{target}{x}_layernorm.weight", (norm,), vllm=own))
    return parameters
