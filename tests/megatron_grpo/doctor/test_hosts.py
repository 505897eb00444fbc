"""Several hosts: their findings come to rank 0, and their clocks are compared."""

import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from distributed import run_ranks
from megatron_grpo.doctor.finding import Finding
from megatron_grpo.doctor.gathering import gather
from megatron_grpo.doctor.hosts import HostReport, differing, judge_clocks
from megatron_grpo.launch.launch import RankPlace

TORCH = Finding("packages", "torch", "ok", "2.13.0")


def report_of_rank_0(rank: int, seconds_ahead: tuple[float, ...]) -> list[HostReport]:
    """Gather from hosts whose clocks are ahead by these values, each with a second, silent rank."""
    port = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if rank > 0:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    host, local_rank = divmod(rank, 2)
    place = RankPlace(rank, local_rank, dist.get_world_size(), num_hosts=len(seconds_ahead))
    reports = gather(store, place, [TORCH], lambda: time.time() + seconds_ahead[host])
    dist.barrier()
    return reports


def test_clocks_are_compared_to_a_part_of_a_message_time():
    reports, *others = run_ranks(4, report_of_rank_0, (0.0, 7.5))
    assert others == [[], [], []]
    assert [report.findings for report in reports] == [(TORCH,)] * 2
    assert reports[1].ahead == pytest.approx(7.5, abs=reports[1].uncertainty + 1e-3)
    assert reports[1].uncertainty < 0.5
    finding = judge_clocks(reports)
    assert finding.status == "warning" and "between 2 hosts" in finding.value


def test_equal_clocks_are_ok_and_one_host_has_nothing_to_compare():
    reports = [HostReport("n0", ()), HostReport("n1", (), ahead=-0.02, uncertainty=0.001)]
    finding = judge_clocks(reports)
    assert finding.status == "ok"
    assert finding.value == "20.0 ms between 2 hosts, give or take 1.0 ms"
    assert judge_clocks(reports[:1]).value == "one host: nothing to compare with"


def test_another_version_on_one_host_is_a_warning():
    hosts = [HostReport("n0", (TORCH,)), HostReport("n1", (TORCH,))]
    others = [HostReport(f"n{number}", (replace(TORCH, value="2.12.0"),)) for number in (2, 3)]
    (finding,) = differing([*hosts, *others])
    assert finding.status == "warning"
    assert finding.value == "2.12.0 on 2 of 4 hosts (2, 3), 2.13.0 on host 0"
    assert list(differing(hosts)) == []
