import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from parallel.context import context_indices
from parallel.vocab import chosen_logprobs, local_mask, prediction_targets

CU_SEQLENS = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
NUM_TOKENS = 24


def whole_targets():
    return prediction_targets(CU_SEQLENS, torch.arange(NUM_TOKENS))


def random_case(vocab_size, padded_size, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(NUM_TOKENS, padded_size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator)
    select = torch.rand(NUM_TOKENS, generator=generator) < 0.6
    weights = torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    return logits.to(dtype), tokens, select, weights


def dense(logits, tokens, select, temperature, vocab_size):
    """The definition: full log-softmax, token by token."""
    logprobs, entropy = (torch.zeros(NUM_TOKENS, dtype=logits.dtype) for _ in range(2))
    starts = set(CU_SEQLENS.tolist())
    for t in range(NUM_TOKENS):
        if t not in starts and select[t]:
            everything = torch.log_softmax(logits[t - 1, :vocab_size] / temperature, dim=0)
            logprobs[t] = everything[tokens[t]]
            entropy[t] = -(everything.exp() * everything).sum()
    return logprobs, entropy


def gradients(logprobs, entropy, weights, other_weights, logits):
    """To the logits: of weighted log-probabilities, of weighted entropies, and of both at once."""
    first, second = (logprobs * weights).sum(), (entropy * other_weights).sum()
    return [
        torch.autograd.grad(loss, logits, retain_graph=True)[0]
        for loss in (first, second, first + second)
    ]


def test_targets_are_the_next_token_and_nothing_at_the_end_of_a_sequence():
    targets = prediction_targets(torch.tensor([0, 3, 5], dtype=torch.int32), torch.arange(5))
    assert targets.tolist() == [1, 2, -1, 4, -1]


def test_targets_follow_the_order_in_which_a_context_rank_holds_its_positions():
    indices = torch.tensor([0, 1, 6, 7])  # zigzag rank 0 of 2 on one sequence of 8
    assert prediction_targets(torch.tensor([0, 8]), indices).tolist() == [1, 2, 7, -1]


@pytest.mark.parametrize("context_size", [1, 2])
def test_every_token_but_the_first_of_a_sequence_is_predicted_on_exactly_one_context_rank(
    context_size,
):
    count = sum(
        local_mask(
            prediction_targets(CU_SEQLENS, context_indices(CU_SEQLENS, rank, context_size)),
            NUM_TOKENS,
        ).int()
        for rank in range(context_size)
    )
    assert count.tolist() == [0 if t in (0, 8, 12) else 1 for t in range(NUM_TOKENS)]


@pytest.mark.parametrize("chunk_size", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [16, 13])
def test_one_rank_equals_the_dense_definition(chunk_size, temperature, vocab_size):
    logits, tokens, select, weights = random_case(vocab_size, 16)
    logits.requires_grad_()
    expected, expected_entropy = dense(logits, tokens, select, temperature, vocab_size)
    other = weights.flip(0)
    expected_grads = gradients(expected, expected_entropy, weights, other, logits)

    logprobs, entropy = chosen_logprobs(
        logits,
        tokens,
        whole_targets(),
        select,
        temperature=temperature,
        vocab_size=vocab_size,
        tensor_group=None,
        chunk_size=chunk_size,
    )
    grads = gradients(logprobs, entropy, weights, other, logits)
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


def test_rows_that_predict_nothing_wanted_are_never_read():
    logits, tokens, select, _ = random_case(16, 16)
    targets = whole_targets()
    unused = (targets < 0) | ~select[targets]
    assert unused.any()
    logits[unused] = float("nan")
    logits.requires_grad_()
    logprobs, entropy = chosen_logprobs(
        logits, tokens, targets, select, temperature=1.0, vocab_size=16, tensor_group=None
    )
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()
    assert grad.isfinite().all()
    assert not grad[unused].any()


def test_nothing_selected_gives_zeros_and_a_zero_gradient():
    logits, tokens, select, _ = random_case(16, 16)
    logits.requires_grad_()
    logprobs, entropy = chosen_logprobs(
        logits,
        tokens,
        whole_targets(),
        torch.zeros_like(select),
        temperature=1.0,
        vocab_size=16,
        tensor_group=None,
    )
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert not logprobs.any()
    assert not entropy.any()
    assert not grad.any()


def test_logits_far_from_zero_do_not_overflow():
    logits, tokens, select, _ = random_case(16, 16, torch.float32)
    near, _ = dense(logits.double(), tokens, select, 1.0, 16)
    logprobs, entropy = chosen_logprobs(
        logits + 1000,
        tokens,
        whole_targets(),
        select,
        temperature=1.0,
        vocab_size=16,
        tensor_group=None,
    )
    torch.testing.assert_close(logprobs.double(), near, rtol=0, atol=1e-3)  # 1000 has ulp 6e-5
    assert entropy.isfinite().all()


def test_bfloat16_logits_are_summed_in_float32_and_get_a_bfloat16_gradient():
    logits, tokens, select, weights = random_case(250, 250, torch.bfloat16)
    wide = logits.double().requires_grad_()
    expected, expected_entropy = dense(wide, tokens, select, 0.9, 250)
    both = (expected + 0.5 * expected_entropy) * weights
    (expected_grad,) = torch.autograd.grad(both.sum(), wide)
    logits.requires_grad_()
    logprobs, entropy = chosen_logprobs(
        logits, tokens, whole_targets(), select, temperature=0.9, vocab_size=250, tensor_group=None
    )
    (grad,) = torch.autograd.grad(((logprobs + 0.5 * entropy) * weights).sum(), logits)
    assert (logprobs.dtype, entropy.dtype, grad.dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )
    torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2**-8, atol=1e-7)


def test_a_vocabulary_that_the_ranks_do_not_split_is_refused_with_the_least_legal_width():
    logits, tokens, select, _ = random_case(13, 16)
    with pytest.raises(
        ValueError, match=r"16 columns each do not split a vocabulary of 17.* 17 col"
    ):
        chosen_logprobs(
            logits,
            tokens,
            whole_targets(),
            select,
            temperature=1.0,
            vocab_size=17,
            tensor_group=None,
        )


def tensor_parallel_rank(rank, world_size, vocab_size, dtype, chunk_size):
    padded = -(-vocab_size // world_size) * world_size
    logits, tokens, select, weights = random_case(vocab_size, padded, dtype)
    local = logits.chunk(world_size, dim=1)[rank].clone().requires_grad_()
    logprobs, entropy = chosen_logprobs(
        local,
        tokens,
        whole_targets(),
        select,
        temperature=0.8,
        vocab_size=vocab_size,
        tensor_group=dist.group.WORLD,
        chunk_size=chunk_size,
    )
    grads = gradients(logprobs, entropy, weights, weights.flip(0), local)
    return logprobs.detach(), entropy.detach(), grads


@pytest.mark.parametrize("world_size, vocab_size", [(2, 13), (4, 13), (4, 16)])
def test_tensor_parallel_ranks_all_get_the_dense_values_and_their_part_of_the_gradient(
    world_size, vocab_size
):
    results = run_ranks(world_size, tensor_parallel_rank, world_size, vocab_size, torch.float64, 7)
    padded = -(-vocab_size // world_size) * world_size
    logits, tokens, select, weights = random_case(vocab_size, padded)
    logits.requires_grad_()
    expected, expected_entropy = dense(logits, tokens, select, 0.8, vocab_size)
    expected_grads = gradients(expected, expected_entropy, weights, weights.flip(0), logits)
    for logprobs, entropy, _ in results:
        torch.testing.assert_close(logprobs, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(logprobs, results[0][0])
        assert torch.equal(entropy, results[0][1])
    whole = [torch.cat(parts, dim=1) for parts in zip(*(g for _, _, g in results), strict=True)]
    torch.testing.assert_close(whole, expected_grads, rtol=1e-12, atol=1e-12)


def context_and_tensor_parallel_rank(rank):
    """Ranks 0-1 share the vocabulary of context rank 0, ranks 2-3 that of context rank 1."""
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    context_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    context_rank, tensor_rank = divmod(rank, 2)
    logits, tokens, select, weights = random_case(13, 14)
    indices = context_indices(CU_SEQLENS, context_rank, 2)
    local = logits[indices].chunk(2, dim=1)[tensor_rank].clone().requires_grad_()
    logprobs, entropy = chosen_logprobs(
        local,
        tokens,
        prediction_targets(CU_SEQLENS, indices),
        select,
        temperature=0.8,
        vocab_size=13,
        tensor_group=tensor_groups[context_rank],
    )
    (grad,) = torch.autograd.grad(((logprobs + 0.5 * entropy) * weights).sum(), local)
    whole = torch.stack([logprobs.detach(), entropy.detach()])
    dist.all_reduce(whole, group=context_groups[tensor_rank])
    return whole, indices, grad


def test_the_sum_over_context_ranks_is_the_whole_and_each_has_the_gradient_of_its_rows():
    results = run_ranks(4, context_and_tensor_parallel_rank)
    logits, tokens, select, weights = random_case(13, 14)
    logits.requires_grad_()
    expected, expected_entropy = dense(logits, tokens, select, 0.8, 13)
    both = (expected + 0.5 * expected_entropy) * weights
    (expected_grad,) = torch.autograd.grad(both.sum(), logits)
    for rank, (whole, indices, grad) in enumerate(results):
        torch.testing.assert_close(whole[0], expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole[1], expected_entropy.detach(), rtol=1e-12, atol=1e-12)
        columns = slice(7 * (rank % 2), 7 * (rank % 2) + 7)
        torch.testing.assert_close(grad, expected_grad[indices, columns], rtol=1e-12, atol=1e-12)
