"""A user's loss: what it gets, and what a trial refuses."""

from pathlib import Path

import pytest

from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.config.grpo import LOSS_TYPES, GRPOConfig

REFUSED = {
    "(advantages.mean() - advantages) * ratio": "loss .* the others of its microbatch, so that it",
    "-ratio * advantages * (1 + ratio.mean() - ratio.mean().detach())": "gradient .* the others of",
    "-ratio * advantages, {'drift': ratio.mean().expand(len(ratio))}": "drift .* the others of",
    "-ratio * advantages * ratio.detach().cumsum(0)": "loss .* changes with the",
    "(-ratio * advantages).sum()": r"for 8 tokens its loss has the shape \[\], not \[8\]",
    "-ratio * advantages, {'drift': 0.5}": "its drift has the shape float",
    "-ratio.detach() * advantages": "no gradient by the log-probabilities",
    "-advantages * (ratio - 1).abs().sqrt()": "with log-ratios .* gradient is .*nan",
    "-ratio * advantages / undefined": "has failed on 8 tokens: .*line 1.*NameError",
    "1 +": "cannot be imported: .*line 1.*SyntaxError",
}
"""What a loss returns, and why it is refused."""


@pytest.fixture
def loaded(tmp_path: Path):
    """Load a loss that returns `expression`, with `options` of the table `grpo`."""

    def load(expression: str, parameters: str = "ratio, advantages, logprobs", **options):
        file = tmp_path / "mine.py"
        file.write_text(f"def mine({parameters}): return {expression}\n", encoding="utf-8")
        cfg = GRPOConfig(generation_batch_size=8, loss_type=f"{file}:mine", **options)
        return LossFunction.of(cfg)

    return load


@pytest.mark.parametrize("expression", REFUSED)
def test_a_loss_that_cannot_be_trained_with_is_refused_by_a_trial(expression, loaded):
    with pytest.raises(ValueError, match=f"(?s){REFUSED[expression]}"):
        loaded(expression)


def test_a_loss_gets_its_arguments_and_the_clips_that_it_names(loaded):
    takes = "ratio, advantages, epsilon_high, *, tau=1.0, **others"
    function = loaded("-ratio * advantages", takes, epsilon_high=0.3, loss_arguments={"k": 2})
    assert function.arguments == {"epsilon_high": 0.3, "k": 2}
    with pytest.raises(ValueError, match="'tau'; the run gives ratio, log_ratio"):
        loaded("-ratio * advantages", "ratio, advantages, *, tau", loss_arguments={"taw": 2})
    with pytest.raises(ValueError, match="loss_arguments: the run gives epsilon"):
        loaded("-ratio * advantages", takes, loss_arguments={"epsilon": 0.1})


def test_a_loss_with_rollout_weights_is_tried_with_them(loaded):
    takes, mode = "ratio, advantages, rollout_weights", "token_truncate"
    weighted = "-ratio * advantages * rollout_weights"
    loaded(weighted, takes, rollout_importance_sampling_mode=mode)
    with pytest.raises(ValueError, match=r"(?s)has failed .*NoneType"):
        loaded(weighted, takes)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_trial_finds_the_masks_of_clipped_tokens_of_a_built_in_loss(loss_type):
    known = LOSS_TYPES[loss_type]
    options = {"importance_sampling_level": known.level} if known.level else {}
    options |= {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    function = LossFunction.of(GRPOConfig(generation_batch_size=8, loss_type=loss_type, **options))
    assert {*function.arguments} == {*known.keys}
    assert bool(function.values) == ("epsilon_high" in known.keys)
