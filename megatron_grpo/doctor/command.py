"""The command `megatron-grpo doctor`: examine, gather, print."""

import os
from pathlib import Path

from megatron_grpo.config.config import Config
from megatron_grpo.doctor.examination import examine
from megatron_grpo.doctor.finding import can_train
from megatron_grpo.doctor.hosts import HostReport, differing, judge_clocks
from megatron_grpo.doctor.packages import Wanted
from megatron_grpo.doctor.report import show
from megatron_grpo.launch.launch import RankPlace


def diagnose(cfg: Config | None, place: RankPlace | None) -> bool:
    """Examine this host, or all hosts of the job that `place` belongs to, and print the findings.

    Returns whether training can start on all of them; ranks other than 0 print nothing and return
    True. Raises ValueError if the hosts do not meet.
    """
    run_dir = cfg.train.run_dir if cfg else Path()
    if place is None:
        reports = [HostReport("here", tuple(examine(run_dir, _wanted(cfg))))]
    else:
        # If hosts do not meet, our message is one line, while torch would log pages.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from megatron_grpo.doctor.gathering import gather, meet  # torch: seconds, see cli.py

        store = meet(place)
        findings = tuple(examine(run_dir, _wanted(cfg))) if place.local_rank == 0 else ()
        reports = gather(store, place, findings)
        if place.rank > 0:
            return True
    common = [judge_clocks(reports), *differing(reports)]
    show(reports, common)
    return all(can_train(report.findings) for report in reports)


def _wanted(cfg: Config | None) -> Wanted:
    if cfg is None:
        return Wanted()
    local = cfg.model.dtype == "float32" or cfg.model.megatron.get("transformer_impl") == "local"
    return Wanted(
        vllm=cfg.rollout.engine == "vllm" and not cfg.rollout.base_urls,
        wandb=cfg.wandb.project is not None,
        transformer_engine=not local,
    )
