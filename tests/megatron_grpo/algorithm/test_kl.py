"""The effect of the KL estimators on the policy, and the weight of the KL in a step."""

import pytest
import torch

from helpers.oracle.grpo import divergence
from megatron_grpo.algorithm.kl import adapted_beta, kl_estimate


@pytest.fixture
def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [8]: the policy's, with gradient, and the reference's."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    return torch.log_softmax(logits, -1)[0].requires_grad_(), torch.log_softmax(logits, -1)[1]


def towards_the_reference(gradient: torch.Tensor, policies) -> float:
    """Cosine between the gradient of the loss and that of the true KL."""
    p, q = policies
    softmax = torch.softmax(p, -1)  # normalised: gradients stay on the simplex
    divergence = (softmax * (torch.log_softmax(p, -1) - q)).sum()
    (exact,) = torch.autograd.grad(divergence, p)
    return torch.cosine_similarity(gradient, exact, dim=0).item()


@pytest.mark.parametrize(("estimator", "holds"), [("k1", True), ("k2", False), ("k3", False)])
def test_only_k1_in_the_reward_pulls_the_policy_to_the_reference(estimator, holds, policies):
    p, q = policies
    logprobs = torch.log_softmax(p, -1)
    penalty = kl_estimate(logprobs, q, estimator).detach()  # a reward is not differentiated
    (gradient,) = torch.autograd.grad((logprobs.exp().detach() * penalty * logprobs).sum(), p)
    cosine = towards_the_reference(gradient, policies)
    assert cosine == pytest.approx(1) if holds else cosine < 0


@pytest.mark.parametrize(("estimator", "least"), [("k2", 1 - 1e-9), ("k3", 0.5)])
def test_in_the_loss_k2_has_the_gradient_of_the_divergence_and_k3_its_direction(
    estimator, least, policies
):
    p, q = policies
    logprobs = torch.log_softmax(p, -1)
    term = (logprobs.exp().detach() * kl_estimate(logprobs, q, estimator)).sum()
    (gradient,) = torch.autograd.grad(term, p)
    assert towards_the_reference(gradient, policies) >= least


def test_in_the_loss_k1_has_no_gradient_without_the_ratio(policies):
    p, q = policies
    logprobs = torch.log_softmax(p, -1)
    k1, drawn = kl_estimate(logprobs, q, "k1"), logprobs.exp().detach()
    (gradient,) = torch.autograd.grad((drawn * k1).sum(), p, retain_graph=True)
    torch.testing.assert_close(gradient, torch.zeros_like(p), atol=1e-15, rtol=0)
    ratio = (logprobs - logprobs.detach()).exp()
    (gradient,) = torch.autograd.grad((drawn * ratio * k1).sum(), p)
    assert towards_the_reference(gradient, policies) == pytest.approx(1)


@pytest.mark.parametrize("gap", [-95.0, -21.0, 19.0, 21.0, 95.0])
def test_k3_is_finite_however_far_the_reference_is_and_has_no_gradient_beyond_its_bound(gap):
    values = {}
    for dtype, estimate in [(torch.float32, kl_estimate), (torch.float64, divergence)]:
        p = torch.tensor(-100.0, dtype=dtype, requires_grad=True)
        value = estimate(p, (p + gap).detach(), "k3")
        value.backward()
        values[dtype] = (value.item(), p.grad.item())
    assert values[torch.float32] == pytest.approx(values[torch.float64], rel=1e-5)
    assert (values[torch.float32][1] == 0) == (gap > 20)


def measured(kl: float) -> dict[str, float]:
    return {"kl": kl, "num_response_tokens": 9.0}


@pytest.mark.parametrize(
    ("kl", "change"),
    [(0.02, 0.2), (0.0105, 0.05), (0.01, 0.0), (0.0095, -0.05), (0.0, -0.2)],
    ids=["twice the target", "above it", "at it", "below it", "none"],
)
def test_beta_grows_above_the_target_and_shrinks_below_it_by_a_fifth_at_most(kl, change):
    # 8 completions are 0.08 of a horizon of 100.
    assert adapted_beta(0.1, measured(kl), 0.01, 8, 100) == pytest.approx(0.1 * (1 + change * 0.08))


@pytest.mark.parametrize(("kl", "beta"), [(0.02, 0.12), (0.0, 0.08)])
def test_a_step_beyond_the_horizon_changes_beta_by_a_fifth_at_most(kl, beta):
    assert adapted_beta(0.1, measured(kl), 0.01, 300, 100) == pytest.approx(beta)


@pytest.mark.parametrize(
    "metrics",
    [{}, {"num_response_tokens": 9.0}, {"kl": 0.0, "num_response_tokens": 0.0}],
    ids=["nothing finite", "a divergence that is not", "no token"],
)
def test_a_step_without_a_divergence_leaves_beta(metrics):
    assert adapted_beta(0.1, metrics, 0.01, 8, 100) == 0.1
