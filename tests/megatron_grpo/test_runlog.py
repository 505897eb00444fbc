import os
from contextlib import closing
from pathlib import Path

import pytest

from megatron_grpo.preemption import Preempted
from megatron_grpo.runlog import RunLog
from parallel import ParallelDims
from policies import tiny_config


def block_picture(log: RunLog) -> None:
    (log.run_dir / "curves.png").mkdir()


def lose_file(log: RunLog) -> None:
    os.close(log.tracking._metrics.fileno())


FAULTS = {
    "curves.png could not be drawn: ": block_picture,
    "the records of the run could not be finished: OSError(9, ": lose_file,
}


@pytest.mark.parametrize(("message", "fault"), FAULTS.items())
def test_what_fails_in_closing_the_log_is_told_and_does_not_hide_why_the_run_ends(
    message, fault, tied_model: Path, tmp_path: Path, capfd
):
    cfg = tiny_config(tied_model, ParallelDims(), f"train.run_dir={tmp_path / 'run'}")
    with pytest.raises(Preempted), closing(RunLog(cfg, 0)) as log:
        log.tracking.log(1, {"reward": 1.0}, [])
        fault(log)
        raise Preempted("step 1 saved")
    assert message in capfd.readouterr().err
