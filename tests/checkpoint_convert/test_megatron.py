"""Layouts of Megatron ranks and checkpoints against tensors fused, padded and split by hand."""

import time
from collections.abc import Mapping
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from checkpoint_convert import (
    ModelShape,
    check_divisible,
    hf_tensors,
    megatron_layout,
    padded_vocab_size,
)
from checkpoint_convert.megatron import checkpoint_boxes, checkpoint_layout, first_senders
from checkpoint_convert.shape import LinearShape
from helpers.models.conversions import assert_same
from helpers.models.shapes import DEEPSEEK_V3, LLAMA_405B, models, shapes
from helpers.ranks.cpu_time import seconds_of_a_million_numbers
from parallel import (
    Box,
    Coordinates,
    Layout,
    ParallelDims,
    ShardMapping,
    cover_exactly,
    intersect,
    pipeline_layers,
)
from parallel.views import as_whole

Tensors = dict[str, Tensor]


def expected_layer(
    weights: Tensors,
    shape: ModelShape,
    dims: ParallelDims,
    at: Coordinates,
    transformer_engine: bool,
) -> Tensors:
    """One layer as Megatron-Core holds it, from `weights` named as in the files."""
    is_linear = "linear_attn.A_log" in weights
    is_dense, names = "mlp.down_proj.weight" in weights, ("input_layernorm", "pre_mlp_layernorm")
    norms = [f"{name}.weight" for name in names]
    if transformer_engine and shape.latent is None:
        projection = "in_proj" if is_linear else "linear_qkv"
        norms[0] = f"self_attention.{projection}.layer_norm_weight"
    if transformer_engine and is_dense:
        norms[1] = "mlp.linear_fc1.layer_norm_weight"
    layer = {
        norms[0]: weights["input_layernorm.weight"],
        norms[1]: weights["post_attention_layernorm.weight"],
    }
    block = "linear_attn." if is_linear else "self_attn."
    attention = {
        name.removeprefix(block): values
        for name, values in weights.items()
        if name.startswith(block)
    }
    if is_linear:
        expected = expected_linear(attention, shape.linear, at.tensor, dims.tensor)
    elif shape.latent is None:
        expected = expected_attention(attention, shape, at.tensor, dims.tensor)
    else:
        expected = expected_latents(attention, at.tensor, dims.tensor, transformer_engine)
    layer |= {f"self_attention.{name}": values for name, values in expected.items()}
    if is_dense:
        layer |= expected_mlp(weights, "mlp.", at.tensor, dims.tensor)
    else:
        layer |= expected_experts(weights, shape, dims, at, transformer_engine)
    return layer


def expected_attention(weights: Tensors, shape: ModelShape, rank: int, size: int) -> Tensors:
    groups = shape.num_key_value_heads

    def qkv(kind: str) -> Tensor:
        parts = [weights[f"{x}_proj.{kind}"] for x in "qkv"]
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1).chunk(size)[rank]

    attention = {
        "linear_qkv.weight": qkv("weight"),
        "linear_proj.weight": weights["o_proj.weight"].chunk(size, 1)[rank],
    }
    if shape.attention_bias:
        attention["linear_qkv.bias"] = qkv("bias")
    if shape.has_output_bias:
        attention["linear_proj.bias"] = weights["o_proj.bias"]
    if shape.qk_norm:
        attention |= {f"{x}_layernorm.weight": weights[f"{x}_norm.weight"] for x in "qk"}
    return attention


def expected_linear(weights: Tensors, linear: LinearShape, rank: int, size: int) -> Tensors:
    """Every rank has whole key heads, with all rows of a head together."""
    groups, keys, values = linear.num_key_heads, linear.key_dim, linear.num_value_heads
    sizes = [groups * keys, groups * keys, values * linear.value_dim]

    def by_group(*parts: Tensor) -> Tensor:
        cut = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(cut, dim=1).flatten(0, 1).chunk(size)[rank]

    if "in_proj_qkvz.weight" in weights:  # of each group together
        parts = [weights[f"in_proj_{x}.weight"] for x in ("qkvz", "ba")]
    else:
        parts = [*weights["in_proj_qkv.weight"].split(sizes)]
        parts += [weights[f"in_proj_{x}.weight"] for x in "zba"]
    return {
        "in_proj.weight": by_group(*parts),
        "conv1d_weight": by_group(*weights["conv1d.weight"].split(sizes)),
        "dt_bias": weights["dt_bias"].chunk(size)[rank],
        "A_log": weights["A_log"].chunk(size)[rank],
        "out_norm_weight": weights["norm.weight"],
        "out_proj.weight": weights["out_proj.weight"].chunk(size, 1)[rank],
    }


def expected_latents(weights: Tensors, rank: int, size: int, transformer_engine: bool) -> Tensors:
    """Every rank has the whole down-projections, and its own heads of the up-projections."""
    norm = "linear_{}_up_proj.layer_norm_weight" if transformer_engine else "{}_layernorm.weight"
    up = {
        "q_proj": "linear_q_proj.weight",
        "q_b_proj": "linear_q_up_proj.weight",
        "kv_b_proj": "linear_kv_up_proj.weight",
    }
    whole = {
        "q_a_proj": "linear_q_down_proj.weight",
        "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
        "q_a_layernorm": norm.format("q"),
        "kv_a_layernorm": norm.format("kv"),
    }
    expected = {"linear_proj.weight": weights["o_proj.weight"].chunk(size, 1)[rank]}
    for name, values in weights.items():
        source = name.removesuffix(".weight")
        if source in up:
            expected[up[source]] = values.chunk(size)[rank]
        elif source in whole:
            expected[whole[source]] = values
    return expected


def expected_mlp(weights: Tensors, name: str, rank: int, size: int) -> Tensors:
    projections = (weights[f"{name}{x}_proj.weight"] for x in ("gate", "up", "down"))
    inward, outward = gated(*projections, rank, size)
    return {f"{name}linear_fc1.weight": inward, f"{name}linear_fc2.weight": outward}


def gated(gate: Tensor, up: Tensor, down: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    inward = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    return inward, down.chunk(size, 1)[rank]


def expected_experts(
    weights: Tensors,
    shape: ModelShape,
    dims: ParallelDims,
    at: Coordinates,
    transformer_engine: bool,
) -> Tensors:
    block, projections = "mlp", ("gate_proj", "up_proj", "down_proj")
    if shape.family == "mixtral":
        block, projections = "block_sparse_moe", ("w1", "w3", "w2")
    layer = {"mlp.router.weight": weights[f"{block}.gate.weight"]}
    if shape.moe.score_function == "sigmoid":
        layer["mlp.router.expert_bias"] = weights[f"{block}.gate.e_score_correction_bias"]
    if shape.moe.shared_intermediate_size:
        names = {x: x.replace("shared_expert.", "shared_experts.") for x in weights}
        own = {names[x]: values for x, values in weights.items()}
        layer |= expected_mlp(own, "mlp.shared_experts.", at.tensor, dims.tensor)
    if shape.moe.has_shared_gate:
        layer["mlp.shared_experts.gate_weight"] = weights["mlp.shared_expert_gate.weight"]
    place, count = dims.expert_place(at), shape.moe.num_experts // dims.expert
    for local in range(count):
        prefix = f"{block}.experts.{place.expert * count + local}"
        matrices = (weights[f"{prefix}.{x}.weight"] for x in projections)
        matrices = gated(*matrices, place.tensor, dims.expert_tensor)
        for linear, values in zip(("linear_fc1", "linear_fc2"), matrices, strict=True):
            fused, alone = f"{linear}.weight{local}", f"local_experts.{local}.{linear}.weight"
            layer[f"mlp.experts.{fused if transformer_engine else alone}"] = values
    return layer


def layer_weights(weights: Tensors, index: int) -> Tensors:
    prefix = f"model.layers.{index}."
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def expected_rank(
    weights: Tensors,
    shape: ModelShape,
    dims: ParallelDims,
    at: Coordinates,
    transformer_engine: bool,
) -> Tensors:
    rows = padded_vocab_size(shape, dims) - shape.vocab_size

    def vocabulary(name: str) -> Tensor:
        return pad(weights[name], (0, 0, 0, rows)).chunk(dims.tensor)[at.tensor]

    tensors = {}
    chunks = pipeline_layers(shape.num_layers, dims)[at.pipeline]
    if at.pipeline == 0:
        tensors["0.embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
    for chunk, layers in enumerate(chunks):
        for local, index in enumerate(layers):
            own = layer_weights(weights, index)
            layer = expected_layer(own, shape, dims, at, transformer_engine)
            tensors |= {f"{chunk}.decoder.layers.{local}.{k}": v for k, v in layer.items()}
    if at.pipeline == dims.pipeline - 1:
        last = len(chunks) - 1
        tensors[f"{last}.decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if not shape.tie_word_embeddings:
            tensors[f"{last}.output_layer.weight"] = vocabulary("lm_head.weight")
        elif dims.pipeline > 1:
            tensors[f"{last}.output_layer.weight"] = vocabulary("model.embed_tokens.weight")
    return tensors


def expected_checkpoint(weights: Tensors, shape: ModelShape, padded_vocab: int) -> Tensors:
    """Tensors of a checkpoint: not split over ranks, equal layers and experts stacked."""
    rows = padded_vocab - shape.vocab_size
    tensors = {
        "embedding.word_embeddings.weight": pad(
            weights["model.embed_tokens.weight"], (0, 0, 0, rows)
        ),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not shape.tie_word_embeddings:
        tensors["output_layer.weight"] = pad(weights["lm_head.weight"], (0, 0, 0, rows))
    dims = ParallelDims()
    layers = [
        expected_layer(layer_weights(weights, index), shape, dims, dims.coordinates(0), True)
        for index in range(shape.num_layers)
    ]
    if shape.moe is not None:
        mixtures = [layer for i, layer in enumerate(layers) if i not in shape.moe.dense_layers]
        for layer, linear in product(mixtures, ("linear_fc1", "linear_fc2")):
            experts = [
                layer.pop(f"mlp.experts.{linear}.weight{i}") for i in range(shape.moe.num_experts)
            ]
            layer[f"mlp.experts.experts.{linear}.weight"] = torch.stack(experts)
    if shape.linear_layers or shape.num_dense_layers not in (0, shape.num_layers):
        return tensors | {
            f"decoder.layers.{index}.{name}": values
            for index, layer in enumerate(layers)
            for name, values in layer.items()
        }
    return tensors | {
        f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers])
        for name in layers[0]
    }


def weights_and_files(shape: ModelShape) -> tuple[Tensors, Layout]:
    sizes = hf_tensors(shape)
    weights = {name: torch.rand(size) for name, size in sizes.items()}
    return weights, Layout.of_whole_tensors(sizes)


def received(layout: Layout, source: Layout, tensors: Mapping[str, Tensor]) -> Tensors:
    """Local tensors of `layout`, filled from `tensors` of `source`; NaN where nothing is copied."""
    filled = {name: torch.full(size, torch.nan) for name, size in layout.shapes.items()}
    for copy in intersect(source, layout):
        values = as_whole(tensors[copy.source][copy.source_box.slices], copy.source_axes)
        target = filled[copy.destination][copy.destination_box.slices]
        as_whole(target, copy.destination_axes)[:] = values
    for name, box in layout.zeros:
        filled[name][box.slices] = 0.0
    return filled


@given(models(), st.booleans())
def test_every_rank_holds_megatrons_fused_padded_and_split_tensors(model, transformer_engine):
    shape, dims = model
    check_divisible(shape, dims)
    weights, files = weights_and_files(shape)
    layouts = []
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        layout = megatron_layout(shape, dims, at, transformer_engine=transformer_engine)
        layout.check_complete()
        expected = expected_rank(weights, shape, dims, at, transformer_engine)
        assert_same(received(layout, files, weights), expected)
        layouts.append(layout)
    cover_exactly(hf_tensors(shape), layouts)


@given(shapes(), st.integers(0, 3))
def test_a_checkpoint_holds_stacks_that_no_rank_splits(shape, padding):
    padded_vocab = shape.vocab_size + padding
    layout, (weights, files) = checkpoint_layout(shape, padded_vocab), weights_and_files(shape)
    layout.check_complete()
    cover_exactly(hf_tensors(shape), [layout])
    tensors = received(layout, files, weights)
    assert_same(tensors, expected_checkpoint(weights, shape, padded_vocab))
    assert_same(received(files, layout, tensors), weights)


@given(models())
def test_ranks_save_their_own_tensors_and_together_the_checkpoint(model):
    shape, dims = model
    padded_vocab, (weights, files) = padded_vocab_size(shape, dims), weights_and_files(shape)
    checkpoint = checkpoint_layout(shape, padded_vocab)
    ranks = [
        megatron_layout(shape, dims, dims.coordinates(rank), transformer_engine=True)
        for rank in range(dims.world_size)
    ]
    owners = [layout for layout in ranks if any(not piece.is_replica for piece in layout.pieces)]
    tensors = {name: torch.full(size, torch.nan) for name, size in checkpoint.shapes.items()}
    restored = {name: torch.full(size, torch.nan) for name, size in files.shapes.items()}
    saved = []
    for rank, boxes in zip(owners, checkpoint_boxes(shape, dims), strict=True):
        pieces = tuple(
            ShardMapping(f"{key}@{box.start}", Box.whole(box.size), key, box) for key, box in boxes
        )
        chunks = Layout({piece.local: piece.box.size for piece in pieces}, pieces)
        held = received(rank, files, weights)
        values = received(chunks.compose(checkpoint), rank, held)
        for piece in pieces:
            tensors[piece.tensor][piece.box.slices] = values[piece.local]
        for copy in intersect(chunks.compose(checkpoint), files):
            part = as_whole(values[copy.source][copy.source_box.slices], copy.source_axes)
            restored[copy.destination][copy.destination_box.slices] = part
        saved.append(chunks)
    cover_exactly(checkpoint.shapes, saved)
    assert_same(tensors, expected_checkpoint(weights, shape, padded_vocab))
    assert_same(restored, weights)


DEEP_MESH = ParallelDims(
    tensor=8, pipeline=8, data=4, expert=32, expert_tensor=1, num_layers_in_last_pipeline_stage=5
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "dims", "max_millions"),
    [
        pytest.param(LLAMA_405B, ParallelDims(tensor=8, pipeline=16), 45, id="Llama-3.1-405B"),
        pytest.param(DEEPSEEK_V3, DEEP_MESH, 400, id="DeepSeek-V3", marks=pytest.mark.slow),
    ],
)
def test_planning_a_published_model_takes_little_cpu_time(shape, dims, max_millions):
    unit = seconds_of_a_million_numbers()
    start = time.process_time()
    check_divisible(shape, dims)
    layouts = [sender.layout for sender in first_senders(shape, dims)]
    for layout in layouts:
        layout.check_complete()
    cover_exactly(hf_tensors(shape), layouts)
    checkpoint = checkpoint_layout(shape, padded_vocab_size(shape, dims))
    saved = (
        Layout({}, tuple(ShardMapping("", box, key, box) for key, box in boxes))
        for boxes in checkpoint_boxes(shape, dims)
    )
    cover_exactly(checkpoint.shapes, saved)
    taken = time.process_time() - start
    assert taken < max_millions * max(unit, seconds_of_a_million_numbers())
