"""Modules of layers, one case for each kind: weights, and operations without weights."""

from dataclasses import replace
from math import prod

import pytest

from checkpoint_convert import hf_tensors, read_shape
from helpers.models.published import PUBLISHED_MODELS, write_config
from megatron_grpo.planning.attention import Attention, LatentAttention, SparseAttention
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.planning.linear_attention import DeltaRule, Mamba2
from megatron_grpo.planning.mlp import Experts, Mlp
from megatron_grpo.planning.workload import Computed

TOKENS = 8192
PAIRS = TOKENS**2 / 2


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_a_token_is_multiplied_with_the_matrices_of_the_weight_files(name, tmp_path):
    shape = read_shape(write_config(tmp_path, name))
    if shape.moe is not None:  # each token to each expert
        shape = replace(shape, moe=replace(shape.moe, experts_per_token=shape.moe.num_experts))
    for kind in layer_kinds(shape):
        matrices = [
            prod(size)
            for tensor, size in hf_tensors(kind.one_layer).items()
            if ".layers." in tensor and len(size) > 1 and not tensor.endswith("bias")
        ]
        assert sum(each.size for block in kind.blocks for each in block.weights()) == sum(matrices)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        # Queries with keys and weights with values: 32 heads of 128.
        ("Llama-3.1-8B", Attention, {"core_attn": 2 * 32 * (128 + 128) * PAIRS}),
        # A window of 4,096 tokens in 24 of 32 layers.
        ("OLMo-3-7B", Attention, {"core_attn": 2 * 4096 * 2 * (PAIRS / 4 + 4096 * TOKENS * 3 / 4)}),
        ("DeepSeek-V3", LatentAttention, {"core_attn": 2 * 128 * (192 + 128) * PAIRS}),
        (
            "DeepSeek-V3.2",
            SparseAttention,
            {"core_attn": 2 * 128 * (192 + 128) * PAIRS, "indexer": 2 * 64 * 128 * PAIRS},
        ),
        # Chunks of 64 tokens and 32 heads of 128: products of queries and of keys with keys,
        # weights with values, and a triangular system of as many columns as both; three products
        # with the memory.
        (
            "Qwen3-Next-80B-A3B",
            DeltaRule,
            {"delta_rule": TOKENS * 32 * (64 * (3 * 2 * 128 + 256) + 3 * 2 * 128 * 128)},
        ),
        # 64 heads of 64, 8 groups of 128: weights with values, two products with the memory, and
        # of each group queries with keys.
        (
            "Nemotron-3-Nano-30B-A3B",
            Mamba2,
            {"delta_rule": TOKENS * (64 * (2 * 64 * 64 + 2 * 2 * 128 * 64) + 8 * 2 * 64 * 128)},
        ),
        ("Llama-3.1-8B", Mlp, {}),
        ("Qwen3-30B-A3B", Experts, {}),
    ],
)
def test_operations_without_weights_by_hand(name, kind, expected, tmp_path):
    kinds = layer_kinds(read_shape(write_config(tmp_path, name)))
    block = next(block for each in kinds for block in each.blocks if type(block) is kind)
    work = Computed(tokens=TOKENS, pairs=PAIRS)
    assert {each.part: each.forward for each in block.other_flops(work)} == expected
