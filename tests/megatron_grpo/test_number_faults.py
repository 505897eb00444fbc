"""Whole jobs of four ranks in which one rank's gradient is not finite."""

import pytest
import torch
from safetensors.torch import load_file

from helpers.runs.jobs import NUM_RANKS
from helpers.runs.sabotage import SpoilGradient
from helpers.runs.train import read_metrics
from megatron_grpo.checkpoints.trainer_state import read_record

pytestmark = pytest.mark.fault


@pytest.mark.long
def test_a_step_without_a_finite_gradient_is_skipped_named_and_logged(runs, tmp_path):
    """The step before a restart and the step after it are two in a row."""
    run_dir = tmp_path / "run"
    for num_steps, spoilt in ((2, 2), (4, 1)):  # the second and the third step of the run
        sabotage = SpoilGradient(3, steps=(spoilt,))
        with runs.start(run_dir, f"train.num_steps={num_steps}", sabotage=sabotage) as job:
            ended = job.end(120)
        assert ended.exit_codes == [0] * NUM_RANKS, ended.output
        assert ended.survivors == []
        said = [line for line in ended.output.splitlines() if "optimizer step skipped" in line]
        assert len(said) == 1
        assert said[0].endswith(" on rank 3")
        assert "optimizer step skipped" in ended.outputs[0]
    records = read_metrics(run_dir)
    assert [record["skipped_steps"] for record in records] == [0, 1, 1, 0]
    assert [record["grad_norm"] is None for record in records] == [False, True, True, False]
    last = read_record(run_dir / "checkpoints" / "step_4", 4)
    assert last.state.num_skipped_in_a_row == 0
    assert (run_dir / "curves.png").exists()
    weights = load_file(run_dir / "hf" / "model.safetensors")
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
