"""The dense pre-norm decoder that Llama and Qwen share: RoPE, GQA, gated MLP, RMS norms.

Each function describes parameters of Megatron-Core by the tensors of the weight files.
"""

from checkpoint_convert.families.description import Parameter, Tensor
from checkpoint_convert.shape import ModelShape


def embedding(shape: ModelShape, padded_vocab: int) -> list[Parameter]:
    """What only the first pipeline stage holds; the vocabulary padded to `padded_vocab` rows."""
    table = Tensor("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
    zero_rows = padded_vocab - shape.vocab_size
    return [
        Parameter("embedding.word_embeddings.weight", (table,), split=0, zero_rows=zero_rows),
    ]


def head(shape: ModelShape, padded_vocab: int, *, shares_embedding: bool) -> list[Parameter]:
    """What only the last pipeline stage holds.

    A tied head is no parameter where the embedding is at hand (`shares_embedding`), and a copy of
    it on a stage of its own.
    """
    norm = Tensor("model.norm.weight", (shape.hidden_size,))
    parameters = [Parameter("decoder.final_layernorm.weight", (norm,))]
    if not (shape.tie_word_embeddings and shares_embedding):
        tied = shape.tie_word_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        table = Tensor(name, (shape.vocab_size, shape.hidden_size))
        zero_rows = padded_vocab - shape.vocab_size
        parameters.append(
            Parameter("output_layer.weight", (table,), split=0, zero_rows=zero_rows, is_copy=tied)
        )
    return parameters


def layer(
    shape: ModelShape, index: int, local_index: int, tensor_size: int, *, fused_norms: bool
) -> list[Parameter]:
    """Layer `index` of the model, which is layer `local_index` of its pipeline stage.

    `fused_norms`: Transformer Engine keeps a norm in the linear layer that follows it.
    """
    source, target = f"model.layers.{index}.", f"decoder.layers.{local_index}."
    attention_norm, mlp_norm = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if fused_norms
        else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    )
    before_attention = Tensor(source + "input_layernorm.weight", (shape.hidden_size,))
    before_mlp = Tensor(source + "post_attention_layernorm.weight", (shape.hidden_size,))
    return [
        Parameter(target + attention_norm, (before_attention,)),
        *attention(shape, source + "self_attn.", target + "self_attention."),
        Parameter(target + mlp_norm, (before_mlp,)),
        *gated_mlp(shape, source + "mlp.", target + "mlp.", tensor_size),
    ]


def attention(shape: ModelShape, source: str, target: str) -> list[Parameter]:
    """Self-attention; `source` and `target` are prefixes of the names in files and in Megatron."""
    groups, hidden = shape.num_key_value_heads, shape.hidden_size
    query, key_value = shape.num_attention_heads * shape.head_dim, groups * shape.head_dim
    rows = {"q": query, "k": key_value, "v": key_value}

    def qkv(kind: str, *columns: int) -> Parameter:
        tensors = tuple(Tensor(f"{source}{x}_proj.{kind}", (rows[x], *columns)) for x in "qkv")
        return Parameter(f"{target}linear_qkv.{kind}", tensors, split=0, interleave=groups)

    output = Tensor(source + "o_proj.weight", (hidden, query))
    parameters = [
        qkv("weight", hidden),
        Parameter(target + "linear_proj.weight", (output,), split=1),
    ]
    if shape.attention_bias:
        parameters.append(qkv("bias"))
    if shape.qk_norm:
        for x in "qk":
            norm = Tensor(f"{source}{x}_norm.weight", (shape.head_dim,))
            parameters.append(Parameter(f"{target}{x}_layernorm.weight", (norm,)))
    return parameters


def gated_mlp(shape: ModelShape, source: str, target: str, tensor_size: int) -> list[Parameter]:
    """MLP with a gate; `source` and `target` are prefixes of the names in files and in Megatron."""
    inward = (shape.intermediate_size, shape.hidden_size)
    gate, up = (Tensor(f"{source}{name}_proj.weight", inward) for name in ("gate", "up"))
    down = Tensor(source + "down_proj.weight", inward[::-1])
    return [
        Parameter(target + "linear_fc1.weight", (gate, up), split=0, interleave=tensor_size),
        Parameter(target + "linear_fc2.weight", (down,), split=1),
    ]
