import pytest
import torch
import torch.distributed as dist

from helpers.ranks.measure import LargestTensor
from helpers.ranks.processes import run_ranks
from parallel import logit_tiles
from parallel.dtypes import product_dtype
from parallel.logprobs import chosen_logprobs
from parallel.rank_part import Predictions, context_indices, prediction_targets

CU_SEQLENS = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
NUM_TOKENS, HIDDEN_SIZE = 24, 6
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def whole_targets():
    return prediction_targets(CU_SEQLENS, torch.arange(NUM_TOKENS))


class Case:
    """Hidden states, a padded head, tokens with a random selection, and output gradients."""

    def __init__(self, vocab_size, padded_size, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        self.vocab_size = vocab_size
        self.hidden = normal(NUM_TOKENS, HIDDEN_SIZE).to(dtype).requires_grad_()
        self.weight = (2 * normal(padded_size, HIDDEN_SIZE)).to(dtype).requires_grad_()
        self.tokens = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator)
        self.select = torch.rand(NUM_TOKENS, generator=generator) < 0.6
        self.of_logprobs, self.of_entropy = normal(2, NUM_TOKENS)

    def dense(self, temperature):
        """The definition: full log-softmax, token by token; one temperature, or one for each."""
        temperatures = torch.as_tensor(temperature, dtype=torch.float64).expand(NUM_TOKENS)
        logprobs, entropy = (torch.zeros(NUM_TOKENS, dtype=torch.float64) for _ in range(2))
        hidden, weight = self.hidden.double(), self.weight.double()[: self.vocab_size]
        starts = set(CU_SEQLENS.tolist())
        for t in range(NUM_TOKENS):
            if t not in starts and self.select[t]:
                everything = torch.log_softmax(weight @ hidden[t - 1] / temperatures[t], dim=0)
                logprobs[t] = everything[self.tokens[t]]
                entropy[t] = -(everything.exp() * everything).sum()
        return logprobs, entropy

    def ours(self, hidden=None, weight=None, targets=None, tensor_group=None, **options):
        targets = whole_targets() if targets is None else targets
        num_parts = dist.get_world_size(tensor_group) if tensor_group else 1
        chosen = chosen_logprobs(
            self.hidden if hidden is None else hidden,
            self.weight if weight is None else weight,
            self.tokens,
            Predictions.of(targets, self.select, num_parts),
            vocab_size=self.vocab_size,
            tensor_group=tensor_group,
            **{"temperature": 1.0} | options,
        )
        assert chosen.positions.tolist() == sorted(set(chosen.positions.tolist()))
        return chosen.whole(NUM_TOKENS)

    def gradients(self, logprobs, entropy, hidden=None, weight=None):
        """Gradients of hidden states and head: for log-probabilities, entropies, both at once."""
        inputs = [
            self.hidden if hidden is None else hidden,
            self.weight if weight is None else weight,
        ]
        first, second = (logprobs * self.of_logprobs).sum(), (entropy * self.of_entropy).sum()
        return [
            torch.autograd.grad(loss, inputs, retain_graph=True)
            for loss in (first, second, first + second)
        ]


def test_targets_follow_the_order_of_positions_on_a_context_rank():
    indices = torch.tensor([0, 1, 6, 7])  # rank 0 of 2, zigzag, on one sequence of 8
    assert prediction_targets(torch.tensor([0, 8]), indices).tolist() == [1, 2, 7, -1]


@pytest.mark.parametrize("tile_columns", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [16, 13])
def test_one_rank_equals_the_dense_definition(tile_columns, temperature, vocab_size):
    case = Case(vocab_size, 16)
    expected = case.dense(temperature)
    got = case.ours(temperature=temperature, tile_columns=tile_columns)
    torch.testing.assert_close(got, expected, **TIGHT)
    torch.testing.assert_close(case.gradients(*got), case.gradients(*expected), **TIGHT)


def test_each_token_is_computed_at_a_temperature_of_its_own():
    case, temperatures = Case(13, 16), torch.linspace(0.5, 2, NUM_TOKENS, dtype=torch.float64)
    positions = Predictions.of(whole_targets(), case.select).positions
    expected = case.dense(temperatures)
    got = case.ours(temperature=temperatures[positions], tile_columns=5)
    torch.testing.assert_close(got, expected, **TIGHT)
    torch.testing.assert_close(case.gradients(*got), case.gradients(*expected), **TIGHT)


def test_a_single_chosen_token_equals_the_dense_definition():
    case = Case(13, 16)
    case.select = torch.arange(NUM_TOKENS) == 5
    torch.testing.assert_close(case.ours(), case.dense(1.0), **TIGHT)


def test_rows_without_a_selected_prediction_are_never_read():
    case, targets = Case(16, 16), whole_targets()
    unused = (targets < 0) | ~case.select[targets]
    assert unused.any()
    with torch.no_grad():
        case.hidden[unused] = float("nan")
    logprobs, entropy = case.ours()
    gradients = torch.autograd.grad((logprobs + entropy).sum(), [case.hidden, case.weight])
    for values in (logprobs, entropy, *gradients):
        assert values.isfinite().all()
    assert not gradients[0][unused].any()


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_each_of_two_gradients_is_the_same_alone(trained):
    both, one = Case(13, 16), Case(13, 16)
    expected = torch.autograd.grad(sum(both.ours()).sum(), getattr(both, trained))
    for name in {"hidden", "weight"} - {trained}:
        getattr(one, name).requires_grad_(False)
    got = torch.autograd.grad(sum(one.ours()).sum(), getattr(one, trained))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_logits_far_from_zero_do_not_overflow():
    case = Case(16, 16, torch.float32)
    with torch.no_grad():
        case.weight *= 250
    logits = (case.hidden @ case.weight.t()).abs().amax(dim=1)
    assert logits.max() > 3000
    logprobs, entropy = case.ours(tile_columns=5)
    expected, expected_entropy = case.dense(1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=2e-3)


@pytest.mark.skipif(
    product_dtype(torch.bfloat16) == torch.bfloat16, reason="multiplies bfloat16 as it is"
)
def test_bfloat16_is_multiplied_and_summed_in_float32_where_the_cpu_only_emulates_it():
    case = Case(250, 250, torch.bfloat16)
    expected, expected_entropy = case.dense(0.9)
    logprobs, entropy = case.ours(temperature=0.9, tile_columns=30)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    expected_gradients = case.gradients(expected, expected_entropy)
    for got, want in zip(case.gradients(logprobs, entropy), expected_gradients, strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.dtype == torch.bfloat16
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)


def test_bfloat16_products_equal_rounded_logits(monkeypatch):
    """Like a CPU with bfloat16 instructions; an emulated product rounds the same way."""
    monkeypatch.setattr("parallel.logit_tiles.product_dtype", lambda dtype: dtype)
    case = Case(250, 250, torch.bfloat16)
    rounded = (case.hidden @ case.weight.t()).double()
    expected = torch.log_softmax(rounded, dim=1)
    logprobs, entropy = case.ours(tile_columns=30)
    rows = whole_targets()
    wanted = (rows >= 0) & case.select[rows]
    chosen = expected[wanted].gather(1, case.tokens[rows[wanted]][:, None]).squeeze(1)
    torch.testing.assert_close(logprobs[rows[wanted]].double(), chosen, rtol=1e-5, atol=1e-5)
    exact = case.gradients(*case.dense(1.0))
    for got, want in zip(case.gradients(logprobs, entropy), exact, strict=True):
        for one, other in zip(got, want, strict=True):
            assert (one - other).norm() < 0.02 * other.norm()


def test_no_tensor_has_more_elements_than_a_tile_or_the_inputs():
    case = Case(1000, 1000)
    with LargestTensor() as largest:
        case.gradients(*case.ours(tile_columns=50))
    assert largest.num_elements == case.weight.numel()  # 1000 x 6; full logits have 1000 columns


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(1, 17), (2, 16)])
def test_a_vocabulary_that_ranks_do_not_split_is_refused(num_ranks, vocab_size, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: num_ranks)
    case = Case(13, 16)
    case.vocab_size = vocab_size
    with pytest.raises(ValueError, match=f"columns each do not split a vocabulary of {vocab_size}"):
        case.ours(tensor_group="all")


def tensor_parallel_rank(rank, world_size, vocab_size, sequence_parallel, num_selected):
    padded = -(-vocab_size // world_size) * world_size
    case = Case(vocab_size, padded)
    case.select &= torch.arange(NUM_TOKENS) < num_selected
    hidden = case.hidden.chunk(world_size)[rank] if sequence_parallel else case.hidden
    hidden = hidden.detach().clone().requires_grad_()
    weight = case.weight.chunk(world_size)[rank].detach().clone().requires_grad_()
    group = dist.group.WORLD
    got = case.ours(hidden, weight, tensor_group=group, temperature=0.8, tile_columns=3)
    return [values.detach() for values in got], case.gradients(*got, hidden, weight)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "world_size, vocab_size, num_selected",
    [(2, 13, NUM_TOKENS), (4, 13, NUM_TOKENS), (4, 16, NUM_TOKENS), (2, 13, 9), (2, 13, 0)],
)
def test_tensor_ranks_get_the_dense_values_and_their_part_of_the_gradient(
    world_size, vocab_size, num_selected, sequence_parallel
):
    """With 9 selected tokens only the first rank's slice has rows; with 0, no slice has."""
    results = run_ranks(
        world_size, tensor_parallel_rank, world_size, vocab_size, sequence_parallel, num_selected
    )
    case = Case(vocab_size, -(-vocab_size // world_size) * world_size)
    case.select &= torch.arange(NUM_TOKENS) < num_selected
    expected = case.dense(0.8)
    if num_selected == 0:
        expected_gradients = [[torch.zeros_like(x) for x in (case.hidden, case.weight)]] * 3
    else:
        expected_gradients = case.gradients(*expected)
    for values, _ in results:
        torch.testing.assert_close(tuple(values), tuple(x.detach() for x in expected), **TIGHT)
        assert all(map(torch.equal, values, results[0][0]))
    for kind, (of_hidden, of_weight) in enumerate(expected_gradients):
        hidden = [gradients[kind][0] for _, gradients in results]
        weight = [gradients[kind][1] for _, gradients in results]
        torch.testing.assert_close(torch.cat(weight), of_weight, **TIGHT)
        whole = [torch.cat(hidden)] if sequence_parallel else hidden
        for got in whole:
            torch.testing.assert_close(got, of_hidden, **TIGHT)


def context_and_tensor_parallel_rank(rank):
    """Ranks 0-1 share the vocabulary of context rank 0, ranks 2-3 that of context rank 1."""
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    context_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    context_rank, tensor_rank = divmod(rank, 2)
    case, indices = Case(13, 14), context_indices(CU_SEQLENS, context_rank, 2)
    hidden = case.hidden[indices].chunk(2)[tensor_rank].detach().requires_grad_()
    weight = case.weight.chunk(2)[tensor_rank].detach().requires_grad_()
    got = case.ours(
        hidden,
        weight,
        prediction_targets(CU_SEQLENS, indices),
        tensor_groups[context_rank],
        temperature=0.8,
    )
    of_hidden, of_weight = case.gradients(*got, hidden, weight)[-1]
    whole = torch.stack(got).detach()
    for values in (whole, of_weight):
        dist.all_reduce(values, group=context_groups[tensor_rank])
    return whole, indices.chunk(2)[tensor_rank], of_hidden, of_weight


def test_context_ranks_sum_to_the_whole_and_have_the_gradient_of_their_rows():
    """With sequence parallelism."""
    results = run_ranks(4, context_and_tensor_parallel_rank)
    case = Case(13, 14)
    expected = case.dense(0.8)
    expected_hidden, expected_weight = case.gradients(*expected)[-1]
    for rank, (whole, indices, of_hidden, of_weight) in enumerate(results):
        torch.testing.assert_close(whole, torch.stack(expected).detach(), **TIGHT)
        torch.testing.assert_close(of_hidden, expected_hidden[indices], **TIGHT)
        torch.testing.assert_close(of_weight, expected_weight.chunk(2)[rank % 2], **TIGHT)


@pytest.mark.parametrize("has_entropy", [True, False])
def test_the_gradient_of_a_tile_is_equal_in_the_form_compiled_for_gpus(has_entropy):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 40, generator=generator)
    columns = torch.randint(-20, 60, (9,), generator=generator)  # some are in other tiles
    assert len({bool(0 <= column < 40) for column in columns}) == 2
    normalizer, entropy, of_logprob, of_entropy = torch.randn(4, 9, generator=generator)
    forms = []
    for space in (None, logit_tiles._Space(None, torch.empty(9, 40), torch.empty(9, 40))):
        if space:
            logits = space.logits.copy_(logits)
        forms.append(
            logit_tiles._gradient_of_tile(
                logits,
                columns,
                1 / 0.7,
                normalizer,
                entropy,
                of_logprob,
                of_entropy if has_entropy else None,
                torch.float32,
                space,
            ).clone()
        )
    torch.testing.assert_close(*forms, rtol=0, atol=0)
