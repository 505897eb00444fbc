"""The layouts of an engine's workers against the parameters that vLLM itself loads."""

import re
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.multimodal import MULTIMODAL
from checkpoint_convert.families.vision import vision_tensors
from checkpoint_convert.vllm import (
    EngineDims,
    check_engine,
    check_engine_dims,
    engine_dtypes,
    engine_layouts,
    engine_sizes,
    first_worker_layout,
)
from checkpoint_convert.weights import read_weights
from helpers.engines.vllm_workers import loaded_parameters
from helpers.models.conversions import assert_same
from helpers.models.images import PATCH_SIZES, tiny_vision_model
from helpers.models.mxfp4 import mxfp4_copies
from helpers.models.shapes import LLAMA_70B, MIXTRAL_8X7B, QWEN3_30B, shapes
from helpers.models.tiny import servable_model
from helpers.models.towers import tiny_multimodal
from parallel import cover_exactly

MIXTURES = {name for name, family in FAMILIES.items() if family.experts is not None}
UNTIED = ("gpt_oss", "minimax_m2")
"""Families that vLLM never serves with a tied head, and that nobody publishes so: refused."""


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def assert_workers_hold_what_the_layouts_say(cases, dtype=torch.float32, also=""):
    """`cases` are (model folder, EngineDims), all with the same number of workers."""
    name = name_of(dtype)
    for (model, dims), workers in zip(cases, loaded_parameters(cases, name, also), strict=True):
        shape = read_shape(model)
        if also == "vision":
            shape = replace(shape, vision=vision_tensors(model))
        layouts = engine_layouts(shape, dims)
        dtypes = engine_dtypes(shape, name)
        reports = [
            {name: (value.shape, name_of(value.dtype)) for name, value in worker.items()}
            for worker in workers
        ]
        check_engine(layouts, reports, dtypes)
        for layout, worker in zip(layouts, workers, strict=True):
            filled = {
                name: torch.full(size, torch.nan, dtype=getattr(torch, dtypes[name]))
                for name, size in layout.shapes.items()
            }
            read_weights(model, shape, layout, filled)
            for values in (filled[each] for each in filled if each.endswith(".A")):
                values.copy_(-values.exp())  # as pushes bring it
            assert_same(worker, filled)


@pytest.mark.long
def test_engine_layouts_equal_vllms_loaded_weights(tmp_path):
    cases = []
    for number, family in enumerate(sorted({*FAMILIES} - {"kimi_k2"})):  # as deepseek_v3
        kv_heads = (1, 2, 4)[number % 3]
        tied = number % 2 == 0 and family not in UNTIED
        knows_copies = not (FAMILIES[family].norms.over_all_heads or FAMILIES[family].has_sinks)
        if not knows_copies:  # of heads: transformers' code for norms of all, vLLM's for sinks
            kv_heads = max(kv_heads, 2)
        folder = servable_model(tmp_path / family, family, num_key_value_heads=kv_heads, tied=tied)
        cases.append((folder, EngineDims(tensor=2, expert_parallel=family in MIXTURES)))
    folder = servable_model(tmp_path / "no latent of queries", "deepseek_v3", q_lora_rank=None)
    cases.append((folder, EngineDims(tensor=2)))
    folder = servable_model(tmp_path / "biases", "llama", attention_bias=True)
    cases.append((folder, EngineDims(tensor=2)))
    folder = servable_model(tmp_path / "a dense layer", "qwen3_moe", mlp_only_layers=[1])
    cases.append((folder, EngineDims(tensor=2, expert_parallel=True)))
    # The files are float32: we must round as vLLM does.
    assert_workers_hold_what_the_layouts_say(cases, torch.bfloat16)


def text_towers(folder):
    return [
        (
            tiny_multimodal(folder / kind, kind, tied=kind == "qwen3_vl"),
            EngineDims(tensor=2, expert_parallel=kind == "qwen3_vl_moe"),
        )
        for kind in MULTIMODAL
    ]


def vision_towers(folder):
    return [(tiny_vision_model(folder / x, x), EngineDims(tensor=2)) for x in PATCH_SIZES]


def shared_experts(folder):
    """Groups of workers share the experts, or each group has all of them."""
    return [
        (model, EngineDims(tensor=2, data=2, expert_parallel=expert_parallel))
        for family in sorted(MIXTURES - {"kimi_k2"})  # as deepseek_v3
        for model in [servable_model(folder / family, family)]
        for expert_parallel in (False, True)
    ]


def mxfp4(folder):
    """Workers hold MXFP4 codes as they are read."""
    quantized, _ = mxfp4_copies(servable_model(folder / "model", "gpt_oss"), folder)
    return [(quantized, EngineDims(tensor=2, expert_parallel=each)) for each in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("cases_in", [text_towers, vision_towers, shared_experts, mxfp4])
def test_engine_layouts_of_special_models_equal_vllms_loaded_weights(tmp_path, cases_in):
    dtype = torch.float32 if cases_in is shared_experts else torch.bfloat16
    also = "vision" if cases_in is vision_towers else ""
    assert_workers_hold_what_the_layouts_say(cases_in(tmp_path), dtype, also)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_engine_layouts_of_any_heads_and_experts(tmp_path, family, tensor):
    cases = []
    for kv_heads, tied in product((1, 2, 4), (False, True)[: 1 + (family not in UNTIED)]):
        folder = tmp_path / f"{kv_heads}-{tied}"
        servable_model(folder, family, num_key_value_heads=kv_heads, tied=tied)
        if tensor in engine_sizes(read_shape(folder), EngineDims()):
            cases.append((folder, EngineDims(tensor=tensor)))
    if family == "deepseek_v3":
        folder = servable_model(tmp_path / "no latent of queries", family, q_lora_rank=None)
        cases.append((folder, EngineDims(tensor=tensor)))
    if family in MIXTURES:
        keys = FAMILIES[family].experts
        ungrouped = {"n_group": 1, "topk_group": 1} if keys.has_groups else {}
        for num_experts in (4, 5, 6):
            folder = tmp_path / f"{num_experts} experts"
            servable_model(folder, family, **ungrouped, **{keys.num_experts: num_experts})
            dims = EngineDims(tensor=tensor, expert_parallel=True)
            if tensor in engine_sizes(read_shape(folder), dims):  # stacks are in equal shares
                cases.append((folder, dims))
    assert_workers_hold_what_the_layouts_say(cases)


@given(shapes(), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3]), st.booleans())
def test_engine_layouts_hold_each_element_once(shape, tensor, data, expert_parallel):
    dims = EngineDims(tensor=tensor, data=data, expert_parallel=expert_parallel)
    try:
        layouts = engine_layouts(shape, dims)
    except ValueError as error:
        refused = f"data_parallel_size({data})" if data > 1 else f"tensor_parallel_size({tensor})"
        assert refused in str(error)
        return
    for layout in layouts:
        layout.check_complete()
    cover_exactly(hf_tensors(shape), layouts)
    assert first_worker_layout(shape, dims) == layouts[0]
    held = [sum(map(prod, layout.shapes.values())) for layout in layouts]
    assert held[0] == max(held)


def test_engine_layouts_repeat_key_value_heads():
    layouts = engine_layouts(replace(LLAMA_70B, num_layers=1), EngineDims(tensor=16))
    rows = [
        {
            (piece.box.start[0] // 128, piece.is_replica)
            for piece in layout.pieces
            if piece.tensor == "model.layers.0.self_attn.k_proj.weight"
        }
        for layout in layouts
    ]
    assert rows == [{(rank // 2, rank % 2 == 1)} for rank in range(16)]


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        (
            LLAMA_70B,
            EngineDims(tensor=3),
            "tensor_parallel_size(3) cannot split the model: it does not divide "
            "num_attention_heads(64) and does not divide intermediate_size(28672) and is neither a "
            "divisor nor a multiple of num_key_value_heads(8); legal values are "
            "[1, 2, 4, 8, 16, 32, 64]",
        ),
        (
            replace(QWEN3_30B, vocab_size=2**17, num_attention_heads=512),
            EngineDims(tensor=256, expert_parallel=True),
            "it is more than num_experts(128); legal values are [1, 2, 4, 8, 16, 32, 64, 128]",
        ),
        (
            replace(
                MIXTRAL_8X7B,
                moe=replace(MIXTRAL_8X7B.moe, num_experts=6, stacks="alternating"),
            ),
            EngineDims(tensor=4, expert_parallel=True),
            "it does not divide num_experts(6); legal values are [1, 2]",
        ),
        (
            replace(MIXTRAL_8X7B, moe=replace(MIXTRAL_8X7B.moe, num_experts=6)),
            EngineDims(tensor=2, data=2, expert_parallel=True, gathers_mlps=True),
            "with 4 workers does not divide num_experts(6); legal values are [1]",
        ),
        (
            replace(QWEN3_30B, moe=replace(QWEN3_30B.moe, shared_intermediate_size=2080)),
            EngineDims(tensor=2, data=32, expert_parallel=True, gathers_mlps=True),
            "with 64 workers does not divide intermediate_size of the shared expert(2080); legal "
            "values are [1]",
        ),
        (
            replace(MIXTRAL_8X7B, vocab_size=64, num_attention_heads=128),
            EngineDims(tensor=128),
            "it does not divide padded vocabulary(64)",
        ),
    ],
)
def test_check_engine_dims_names_the_legal_sizes(shape, dims, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_engine_dims(shape, dims)


def test_check_engine_names_other_parameters():
    shape, dims = replace(LLAMA_70B, num_layers=1), EngineDims(tensor=2)
    layouts, dtypes = engine_layouts(shape, dims), engine_dtypes(shape, "bfloat16")
    reports = [
        {name: (size, "bfloat16") for name, size in layout.shapes.items()} for layout in layouts
    ]
    check_engine(layouts, reports, dtypes)

    reports[0]["model.layers.0.self_attn.sinks"] = ((32,), "bfloat16")
    del reports[0]["lm_head.weight"]
    reports[1]["model.norm.weight"] = ((8192,), "float32")
    reports[1]["model.layers.0.mlp.down_proj.weight"] = ((0,), "bfloat16")
    with pytest.raises(ValueError) as refusal:
        check_engine(layouts, reports, dtypes)
    assert str(refusal.value).splitlines()[1:] == [
        "  worker 0: lm_head.weight [64128, 8192] is missing",
        "  worker 0: model.layers.0.self_attn.sinks [32] is filled by no weight of the model",
        "  worker 1: model.layers.0.mlp.down_proj.weight has shape [0] instead of [8192, 14336]",
        "  worker 1: model.norm.weight has dtype float32 instead of bfloat16",
    ]


def test_check_engine_refuses_another_size():
    layouts = engine_layouts(replace(LLAMA_70B, num_layers=1), EngineDims(tensor=2))
    with pytest.raises(ValueError, match="1 worker but was planned with 2"):
        check_engine(layouts, [{}], {})
