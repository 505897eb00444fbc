import os
from contextlib import closing
from pathlib import Path

import pytest

from megatron_grpo.launch.preemption import Preempted
from megatron_grpo.reporting.runlog import RunLog
from parallel import ParallelDims
from policies import tiny_config


def test_what_fails_in_closing_the_log_is_told_and_does_not_hide_why_the_run_ends(
    tied_model: Path, tmp_path: Path, capfd
):
    cfg = tiny_config(tied_model, ParallelDims(), f"train.run_dir={tmp_path / 'run'}")
    with pytest.raises(Preempted), closing(RunLog(cfg, 0)) as log:
        log.tracking.log(1, {"reward": 1.0}, [])  # too little to draw
        os.close(log.tracking._metrics.fileno())
        raise Preempted("step 1 saved")
    told = capfd.readouterr().err
    assert "the records of the run could not be finished: OSError(9, " in told
    assert "curves.png could not be drawn: " in told
