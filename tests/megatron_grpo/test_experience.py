"""Dialogues in the loss: what was observed is read, and has no gradient."""

import pytest
import torch

from megatron_grpo.experience import Experience, share_out
from megatron_grpo.loss import grpo_loss
from megatron_grpo.prompts import Prompt
from megatron_grpo.rollout.samples import Sample
from parallel import ParallelDims
from parallel.microbatches import CostModel
from policies import tiny_config

COMPLETIONS = [  # token, and whether it was sampled
    [(10, 1), (11, 1), (12, 0), (13, 0), (14, 1)],
    [(20, 1)],
    [(30, 1), (31, 0), (32, 1), (33, 0), (34, 1), (35, 1)],
    [],  # the environment failed before the first turn
]
NUM_SAMPLED = [3, 1, 4, 0]


def experience(logprob_of_observations: float = 0.0) -> Experience:
    samples = [
        Sample(
            prompt=Prompt(index=0, token_ids=(5, 6, 7), text="", row={}),
            sample_index=i,
            completion_ids=tuple(token for token, _ in completion),
            logprobs=tuple(
                -1.0 if sampled else logprob_of_observations for _, sampled in completion
            ),
            finish_reason="stop" if completion else "failed",
            text="",
            policy_version=0,
            loss_mask=tuple(bool(sampled) for _, sampled in completion),
        )
        for i, completion in enumerate(COMPLETIONS)
    ]
    return Experience(
        samples, [{}] * 4, torch.zeros(4), torch.zeros(4), torch.tensor([1.0, -1.0, 0.5, 0.0])
    )


def batch_of(cfg, made: Experience):
    [[[batch]]] = share_out(made, 0, CostModel.transformer(64), cfg)
    return batch


@pytest.fixture
def cfg(tmp_path):
    return tiny_config(
        tmp_path,
        ParallelDims(),
        "grpo.generation_batch_size=4",
        "train.max_tokens_per_microbatch=64",
    )


def test_lengths_count_sampled_tokens_only(cfg):
    samples = experience().samples
    assert [sample.num_sampled for sample in samples] == NUM_SAMPLED
    batch = batch_of(cfg, experience())
    sampled = [token for c in COMPLETIONS for token, is_sampled in c if is_sampled]
    assert sorted(batch.tokens[batch.loss_mask].tolist()) == sampled
    for index, count in enumerate(NUM_SAMPLED):
        weights = batch.loss_weights[(batch.sequence_index == index) & batch.loss_mask]
        assert weights.tolist() == pytest.approx([1 / (4 * count)] * count if count else [])
    assert batch.loss_weights.sum() == pytest.approx(3 / 4)


def test_observed_tokens_have_no_gradient_and_their_log_probabilities_no_influence(cfg):
    def loss_of(made: Experience, logprobs: torch.Tensor) -> torch.Tensor:
        batch = batch_of(cfg, made)
        clips = {"epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "beta": 0.1}
        return grpo_loss(
            logprobs,
            batch.rollout_logprobs,
            0.9 * batch.rollout_logprobs,
            batch.advantages,
            batch.loss_weights,
            batch.loss_mask,
            **clips,
        ).total

    batch = batch_of(cfg, experience())
    observed = ~batch.loss_mask
    logprobs = -torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    logprobs.requires_grad_()
    loss = loss_of(experience(), logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert (gradient[observed] == 0).all() and (gradient[~observed] != 0).all()
    other = logprobs.detach() - 3.0 * observed
    assert loss_of(experience(-7.0), other) == loss


def test_what_is_known_of_sampled_tokens_goes_to_their_places(cfg):
    old = [torch.arange(1.0, count + 1) for count in NUM_SAMPLED]
    made = experience()
    batch = batch_of(cfg, Experience(**{**vars(made), "old_logprobs": old}))
    for index in range(4):
        places = (batch.sequence_index == index) & batch.loss_mask
        assert torch.equal(batch.old_logprobs[places], old[index])
    assert (batch.old_logprobs[~batch.loss_mask] == 0).all()
