"""The scripts of slurm/ on a Slurm whose nodes are hosts of their own."""

import re
from functools import partial

import pytest

from helpers.runs.hosts import can_make_hosts
from helpers.runs.jobs import assert_same_run, layout
from helpers.runs.slurm_cluster import PACKAGES, is_installed, running_cluster
from helpers.runs.slurm_jobs import submitter
from helpers.runs.train import read_metrics

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason=f"needs Slurm: apt-get install {PACKAGES}"),
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """A node on each of the hosts for ranks."""
    with running_cluster(tmp_path_factory.mktemp("slurm"), hosts[:4]) as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, given, tied_model, tmp_path):
    """Submits jobs of two ranks on two hosts, with engines on the others."""
    of_job = [*given, *layout("data"), "rollout.base_urls=[]"]
    with submitter(cluster, tied_model) as submit:
        yield partial(submit, *of_job, folder=tmp_path)


def test_a_job_over_hosts_has_the_bits_of_one_host(submit, hosts, one_host):
    before = [host.processes() for host in hosts]
    run = submit(num_nodes=3)
    run.await_end()
    assert_same_run(run.run_dir, one_host("data"))
    assert not re.search("error|Killed|CANCELLED", run.job.output()), run.job.output()
    assert [host.processes() for host in hosts] == before


@pytest.mark.slow
def test_an_engine_over_two_hosts_serves_adapters(submit):
    run = submit("rollout.tensor_parallel_size=2", "lora.r=4", "lora.sync=adapter", num_nodes=4)
    workers = "vllm.entrypoints.openai.api_server", "megatron_grpo.engines.vllm.headless"
    run.wait_for(lambda: all(map(run.processes_of, workers)), 120)
    nodes = [p.environ()["SLURMD_NODENAME"] for each in workers for p in run.processes_of(each)]
    run.await_end()
    assert nodes == ["delta", "gamma"]  # in the order of Slurm
    records = read_metrics(run.run_dir)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    # The engine has the weights of two steps.
    assert records[2]["rollout/logprob_gap_mean"] < 1e-5
