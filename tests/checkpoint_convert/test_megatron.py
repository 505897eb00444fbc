"""Layouts of Megatron ranks against fused, padded and split tensors put together by hand."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from checkpoint_convert import (
    ModelShape,
    check_divisible,
    check_megatron_layouts,
    hf_tensors,
    megatron_layout,
    padded_vocab_size,
)
from parallel import Coordinates, ParallelDims, pipeline_layers

DENSE = {
    "family": "llama",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "qk_norm": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eos_token_ids": (1,),
}
LLAMA_70B = ModelShape(
    num_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
    **DENSE,
)
LLAMA_405B = replace(
    LLAMA_70B, num_layers=126, hidden_size=16384, num_attention_heads=128, intermediate_size=53248
)
QWEN_72B = replace(
    LLAMA_70B, family="qwen2", intermediate_size=29568, vocab_size=152064, attention_bias=True
)


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 4))
    return ModelShape(
        num_layers=draw(st.integers(1, 7)),
        hidden_size=draw(st.integers(1, 9)),
        num_attention_heads=kv_heads * draw(st.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        intermediate_size=draw(st.integers(1, 3)) * 12,
        vocab_size=draw(st.integers(1, 20)),
        **DENSE
        | {
            "tie_word_embeddings": draw(st.booleans()),
            "attention_bias": draw(st.booleans()),
            "qk_norm": draw(st.booleans()),
        },
    )


@st.composite
def meshes(draw):
    pipeline = draw(st.integers(1, 3))
    return ParallelDims(
        tensor=draw(st.sampled_from([1, 2, 3, 4, 6])),
        pipeline=pipeline,
        virtual_pipeline=draw(st.integers(1, 2)) if pipeline > 1 else 1,
    )


def expected_layer(
    weights: dict[str, Tensor], shape: ModelShape, rank: int, size: int, fused_norms: bool
) -> dict[str, Tensor]:
    """One layer as Megatron-Core holds it, from `weights` named as in the files."""
    groups = shape.num_key_value_heads

    def qkv(kind: str) -> Tensor:
        parts = [weights[f"self_attn.{x}_proj.{kind}"] for x in "qkv"]
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1).chunk(size)[rank]

    gate, up = (weights[f"mlp.{x}_proj.weight"].chunk(size)[rank] for x in ("gate", "up"))
    norms = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if fused_norms
        else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    )
    layer = {
        norms[0]: weights["input_layernorm.weight"],
        norms[1]: weights["post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": qkv("weight"),
        "self_attention.linear_proj.weight": weights["self_attn.o_proj.weight"].chunk(size, 1)[
            rank
        ],
        "mlp.linear_fc1.weight": torch.cat([gate, up]),
        "mlp.linear_fc2.weight": weights["mlp.down_proj.weight"].chunk(size, 1)[rank],
    }
    if shape.attention_bias:
        layer["self_attention.linear_qkv.bias"] = qkv("bias")
    if shape.qk_norm:
        for x in "qk":
            layer[f"self_attention.{x}_layernorm.weight"] = weights[f"self_attn.{x}_norm.weight"]
    return layer


def expected_rank(
    weights: dict[str, Tensor],
    shape: ModelShape,
    dims: ParallelDims,
    at: Coordinates,
    fused_norms: bool,
) -> dict[str, Tensor]:
    rows = padded_vocab_size(shape, dims) - shape.vocab_size

    def vocabulary(name: str) -> Tensor:
        return pad(weights[name], (0, 0, 0, rows)).chunk(dims.tensor)[at.tensor]

    tensors = {}
    chunks = pipeline_layers(shape.num_layers, dims)[at.pipeline]
    if at.pipeline == 0:
        tensors["0.embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
    for chunk, layers in enumerate(chunks):
        for local, index in enumerate(layers):
            prefix = f"model.layers.{index}."
            own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            layer = expected_layer(own, shape, at.tensor, dims.tensor, fused_norms)
            tensors |= {f"{chunk}.decoder.layers.{local}.{k}": v for k, v in layer.items()}
    if at.pipeline == dims.pipeline - 1:
        last = len(chunks) - 1
        tensors[f"{last}.decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if not shape.tie_word_embeddings:
            tensors[f"{last}.output_layer.weight"] = vocabulary("lm_head.weight")
        elif dims.pipeline > 1:
            tensors[f"{last}.output_layer.weight"] = vocabulary("model.embed_tokens.weight")
    return tensors


@settings(deadline=None)
@given(shapes(), meshes(), st.booleans())
def test_every_rank_holds_what_megatron_fuses_pads_and_splits(shape, dims, fused_norms):
    try:
        check_divisible(shape, dims)
    except ValueError:
        assume(False)
    check_megatron_layouts(shape, dims, fused_norms=fused_norms)
    weights = {name: torch.rand(size) for name, size in hf_tensors(shape).items()}
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        layout = megatron_layout(shape, dims, at, fused_norms=fused_norms)
        tensors = {name: torch.full(size, torch.nan) for name, size in layout.shapes.items()}
        for piece in layout.pieces:
            values = weights[piece.tensor][piece.box.slices]
            tensors[piece.local][piece.local_box.slices] = values
        for local, box in layout.zeros:
            tensors[local][box.slices] = 0.0
        expected = expected_rank(weights, shape, dims, at, fused_norms)
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name


def test_ranks_above_the_first_of_data_and_context_own_nothing():
    dims = ParallelDims(tensor=8, context=2, data=2, pipeline=2)
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        pieces = megatron_layout(LLAMA_70B, dims, at, fused_norms=True).pieces
        assert any(not piece.is_replica for piece in pieces) == (at.data == at.context == 0)


def test_the_head_that_a_far_stage_keeps_of_a_tied_model_is_a_replica():
    tied = replace(LLAMA_70B, tie_word_embeddings=True)
    dims = ParallelDims(pipeline=2)
    layout = megatron_layout(tied, dims, dims.coordinates(1), fused_norms=True)
    head = [piece for piece in layout.pieces if piece.local == "0.output_layer.weight"]
    assert [(piece.tensor, piece.is_replica) for piece in head] == [
        ("model.embed_tokens.weight", True)
    ]


@pytest.mark.parametrize(
    ("shape", "billions"), [(LLAMA_70B, 70.55), (LLAMA_405B, 405.85), (QWEN_72B, 72.71)]
)
def test_a_published_model_over_64_ranks_is_planned_within_two_cpu_seconds(shape, billions):
    dims = ParallelDims(tensor=8, pipeline=8)
    start = time.process_time()
    check_divisible(shape, dims)
    check_megatron_layouts(shape, dims, fused_norms=True)
    assert time.process_time() - start < 2.0
    num_parameters = sum(torch.Size(size).numel() for size in hf_tensors(shape).values())
    assert round(num_parameters / 1e9, 2) == billions
