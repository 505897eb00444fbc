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
    if fused_norms:
        attention_norm = "self_attention.linear_qkv.layer_norm_weight"
        mlp_norm = "mlp.linear_fc1.layer_norm_weight"
    else:
        attention_norm, mlp_norm = "input_layernorm.weight", "pre_mlp_layernorm.weight"

    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    query = shape.num_attention_heads * shape.head_dim
    key_value = shape.num_key_value_heads * shape.head_dim

    def qkv(kind: str, *columns: int) -> tuple[Tensor, ...]:
        rows = {"q": query, "k": key_value, "v": key_value}
        return tuple(
            Tensor(f"{source}self_attn.{x}_proj.{kind}", (rows[x], *columns)) for x in "qkv"
        )

    def one(name: str, *size: int) -> tuple[Tensor, ...]:
        return (Tensor(source + name, size),)

    gate_up = one("mlp.gate_proj.weight", intermediate, hidden) + one(
        "mlp.up_proj.weight", intermediate, hidden
    )
    o_proj = one("self_attn.o_proj.weight", hidden, query)
    down_proj = one("mlp.down_proj.weight", hidden, intermediate)
    groups = shape.num_key_value_heads
    attention, mlp = f"{target}self_attention.", f"{target}mlp."
    parameters = [
        Parameter(target + attention_norm, one("input_layernorm.weight", hidden)),
        Parameter(attention + "linear_qkv.weight", qkv("weight", hidden), 0, interleave=groups),
        Parameter(attention + "linear_proj.weight", o_proj, split=1),
        Parameter(target + mlp_norm, one("post_attention_layernorm.weight", hidden)),
        Parameter(mlp + "linear_fc1.weight", gate_up, split=0, interleave=tensor_size),
        Parameter(mlp + "linear_fc2.weight", down_proj, split=1),
    ]
    if shape.attention_bias:
        parameters.append(
            Parameter(attention + "linear_qkv.bias", qkv("bias"), split=0, interleave=groups)
        )
    if shape.qk_norm:
        for x in "qk":
            norm = one(f"self_attn.{x}_norm.weight", shape.head_dim)
            parameters.append(Parameter(f"{attention}{x}_layernorm.weight", norm))
    return parameters
