"""Shapes that a mesh can split, and the message where it cannot."""

import re
from dataclasses import replace

import pytest

from checkpoint_convert import LatentShape, MoeShape, check_divisible, padded_vocab_size
from helpers.models.shapes import LLAMA_70B
from parallel import ParallelDims

SHAPE = replace(
    LLAMA_70B,
    num_layers=6,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=480,
    vocab_size=250,
)
MIXTURE = replace(
    SHAPE,
    family="mixtral",
    moe=MoeShape(num_experts=6, experts_per_token=2, intermediate_size=40, normalize_topk=True),
)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_mesh_may_have_more_or_fewer_tensor_ranks_than_key_value_heads(tensor):
    check_divisible(SHAPE, ParallelDims(tensor=tensor, pipeline=2, virtual_pipeline=3))


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        (SHAPE, ParallelDims(tensor=8), "does not divide num_attention_heads(12)"),
        (SHAPE, ParallelDims(tensor=8), "legal values are [1, 2, 4]"),
        (SHAPE, ParallelDims(tensor=3), "a divisor nor a multiple of num_key_value_heads(2)"),
        (SHAPE, ParallelDims(tensor=12), "does not divide rows of the fused QKV projection(256)"),
        (SHAPE, ParallelDims(pipeline=4, virtual_pipeline=2), "6 layers cannot fill"),
        (SHAPE, ParallelDims(data=2, expert=2), "splits experts, but llama has none: set 1"),
        (MIXTURE, ParallelDims(data=12, expert=4), "num_experts(6); legal values are [1, 2, 3, 6]"),
        (
            MIXTURE,
            ParallelDims(data=12, expert_tensor=3),
            "intermediate_size(40); legal values are [1, 2, 4, 5, 8, 10, 20, 40]",
        ),
        (
            replace(MIXTURE, has_linear_biases=True),
            ParallelDims(tensor=2),
            "expert_tensor(2) cannot split the experts: Megatron-Core adds their biases only where "
            "they are whole; legal values are [1]",
        ),
    ],
    ids=str,
)
def test_a_mesh_that_cannot_split_the_model_is_refused_with_the_legal_sizes(shape, dims, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_divisible(shape, dims)


def test_latents_are_split_wherever_their_heads_are():
    latent = LatentShape(query_rank=7, rank=5, rotary_dim=4, value_dim=3)
    shape = replace(SHAPE, num_key_value_heads=12, latent=latent)
    for tensor in (1, 2, 3, 4, 6, 12):
        check_divisible(shape, ParallelDims(tensor=tensor))
    with pytest.raises(ValueError, match=r"legal values are \[1, 2, 3, 4, 6, 12\]"):
        check_divisible(shape, ParallelDims(tensor=8))


@pytest.mark.parametrize(
    "sizes", [{"expert": 6}, {"expert_tensor": 4, "expert": 3}, {"expert_tensor": 8}]
)
def test_experts_have_their_own_tensor_ranks(sizes):
    check_divisible(MIXTURE, ParallelDims(tensor=2, data=12, **{"expert_tensor": 1, **sizes}))


def test_a_mixture_without_dense_layers_ignores_the_dense_intermediate_size():
    check_divisible(replace(MIXTURE, intermediate_size=7), ParallelDims(tensor=4))
    with pytest.raises(ValueError, match=r"does not divide intermediate_size\(7\)"):
        check_divisible(replace(SHAPE, intermediate_size=7), ParallelDims(tensor=4))


def test_the_vocabulary_is_padded_to_a_multiple_of_the_tensor_ranks():
    sizes = {n: padded_vocab_size(SHAPE, ParallelDims(tensor=n)) for n in (1, 2, 4, 8)}
    assert sizes == {1: 250, 2: 250, 4: 252, 8: 256}
