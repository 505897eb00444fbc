"""Which shapes a mesh can split, and the message when it cannot."""

from dataclasses import replace

import pytest

from checkpoint_convert import (
    LatentShape,
    ModelShape,
    MoeShape,
    check_divisible,
    padded_vocab_size,
)
from parallel import ParallelDims

SHAPE = ModelShape(
    family="llama",
    num_layers=6,
    hidden_size=256,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=480,
    vocab_size=250,
    tie_word_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    eos_token_ids=(1,),
)
MIXTURE = replace(
    SHAPE,
    family="mixtral",
    moe=MoeShape(num_experts=6, experts_per_token=2, intermediate_size=40, normalize_topk=True),
)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_divisors_of_heads_pass_with_more_and_with_fewer_ranks_than_key_value_heads(tensor):
    check_divisible(SHAPE, ParallelDims(tensor=tensor, pipeline=2, virtual_pipeline=3))


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        (
            ParallelDims(tensor=8),
            ["does not divide num_attention_heads(12)", "legal values are [1, 2, 4]"],
        ),
        (
            ParallelDims(tensor=3),
            ["neither a divisor nor a multiple of num_key_value_heads(2)", "[1, 2, 4]"],
        ),
        (
            ParallelDims(tensor=12),
            ["does not divide rows of the fused QKV projection(256)", "[1, 2, 4]"],
        ),
        (ParallelDims(pipeline=4, virtual_pipeline=2), ["6 layers cannot fill", "8 stages"]),
        (ParallelDims(data=2, expert=2), ["expert(2)", "llama has none", "set 1"]),
    ],
)
def test_a_mesh_that_cannot_split_the_model_is_refused_with_the_legal_sizes(dims, words):
    with pytest.raises(ValueError) as error:
        check_divisible(SHAPE, dims)
    for word in words:
        assert word in str(error.value)


def test_latents_are_split_wherever_their_heads_are():
    latent = LatentShape(query_rank=7, rank=5, rotary_dim=4, value_dim=3)
    shape = replace(SHAPE, num_key_value_heads=12, latent=latent)
    for tensor in (1, 2, 3, 4, 6, 12):
        check_divisible(shape, ParallelDims(tensor=tensor))
    with pytest.raises(ValueError, match=r"legal values are \[1, 2, 3, 4, 6, 12\]"):
        check_divisible(shape, ParallelDims(tensor=8))


def test_an_intermediate_size_that_the_ranks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"does not divide intermediate_size\(482\)"):
        check_divisible(replace(SHAPE, intermediate_size=482), ParallelDims(tensor=4))


@pytest.mark.parametrize(
    "sizes", [{"expert": 6}, {"expert_tensor": 4, "expert": 3}, {"expert_tensor": 8}]
)
def test_experts_are_split_over_other_ranks_than_the_rest(sizes):
    check_divisible(MIXTURE, ParallelDims(tensor=2, data=12, **{"expert_tensor": 1, **sizes}))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"expert": 4},
            ["expert(4)", "does not divide their num_experts(6)", "[1, 2, 3, 6]"],
        ),
        (
            {"expert_tensor": 3},
            ["expert_tensor(3)", "their intermediate_size(40)", "[1, 2, 4, 5, 8, 10, 20, 40]"],
        ),
    ],
)
def test_a_mesh_that_cannot_split_the_experts_is_refused_with_the_legal_sizes(sizes, words):
    with pytest.raises(ValueError) as error:
        check_divisible(MIXTURE, ParallelDims(data=12, **sizes))
    for word in words:
        assert word in str(error.value)


def test_the_dense_intermediate_size_is_not_split_where_experts_stand_for_the_mlp():
    check_divisible(replace(MIXTURE, intermediate_size=7), ParallelDims(tensor=4))
    with pytest.raises(ValueError, match=r"does not divide intermediate_size\(7\)"):
        check_divisible(replace(SHAPE, intermediate_size=7), ParallelDims(tensor=4))


def test_the_vocabulary_is_padded_to_a_multiple_of_the_tensor_ranks():
    sizes = {n: padded_vocab_size(SHAPE, ParallelDims(tensor=n)) for n in (1, 2, 4, 8)}
    assert sizes == {1: 250, 2: 250, 4: 252, 8: 256}
