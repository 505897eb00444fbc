"""Whole jobs of four ranks in which one rank's gradient is not finite."""

import re

import pytest
import torch
from safetensors.torch import load_file

from helpers.jobs import NUM_RANKS
from helpers.runs import read_metrics
from helpers.sabotage import SpoilGradient
from megatron_grpo.checkpoints.trainer_state import read_record


def test_a_step_without_a_finite_gradient_is_skipped_named_and_logged(runs, tmp_path):
    """The one before a restart and the one behind it are two in a row."""
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
    in_a_row = [
        read_record(run_dir / "checkpoints" / f"step_{step}", step).state.num_skipped_in_a_row
        for step in (3, 4)
    ]
    assert in_a_row == [2, 0]
    assert (run_dir / "curves.png").exists()
    weights = load_file(run_dir / "hf" / "model.safetensors")
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())


@pytest.mark.slow
def test_too_many_in_a_row_stop_the_job_and_a_resumed_one_counts_on(runs, tmp_path):
    run_dir = tmp_path / "run"
    # The save that was under way when the run stopped may be lost: it goes on at step 3 or 4.
    for steps, before in (((2, 3, 4), ""), ((1, 2), r": [12] before this run was resumed")):
        with runs.start(run_dir, sabotage=SpoilGradient(2, steps)) as job:
            ended = job.end(120)
        assert all(code == 1 for code in ended.exit_codes), ended.output
        assert ended.survivors == []
        cause = (
            r"3 optimizer steps in a row were skipped, and train.max_skipped_steps is 3" + before
        )
        assert re.search(cause, ended.outputs[0]), ended.outputs[0]
        assert "on rank 2" in ended.outputs[0]
    resumed = runs.finish(run_dir)
    assert resumed.exit_codes == [0] * NUM_RANKS, resumed.output
    skipped = [record["skipped_steps"] for record in read_metrics(run_dir)]
    assert skipped in ([0, 1, 0, 0], [0, 1, 1, 0])
