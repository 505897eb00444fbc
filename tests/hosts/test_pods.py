"""The pods of `place --kubernetes`, each a host with the names and variables that JobSet gives it.

There is no Kubernetes here: the test starts the manifest's commands, stops them by SIGTERM, and
starts them again on hosts with the same names and other addresses.
"""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from helpers.engines.live import wait_until
from helpers.runs.host_runs import ENVIRONMENT
from helpers.runs.hosts import can_make_hosts, running_hosts
from helpers.runs.jobs import assert_same_run, layout
from helpers.runs.train import TINY_CONFIG, steps_of
from megatron_grpo.cli import app

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root"),
    pytest.mark.timeout(300),
]
JOBSET = "tiny"


@pytest.fixture
def containers(given, tmp_path, monkeypatch):
    """The container of each pod, by the pod's name: two of ranks, one of an engine."""
    monkeypatch.setenv("COLUMNS", "1000")
    own = [each for each in given if not each.startswith("rollout.base_urls")]
    own += [*layout("data"), f"train.run_dir={tmp_path / 'run'}", f"--name={JOBSET}"]
    own += ["--nodes=3", "--gpus-per-node=1", "--image=any", f"--volume=claim:{tmp_path}"]
    shown = CliRunner().invoke(app, ["place", "--kubernetes", str(TINY_CONFIG), *own])
    assert shown.exit_code == 0, shown.output
    return {
        f"{JOBSET}-{job['name']}-0-{number}": job["template"]["spec"]["template"]["spec"]
        for job in yaml.safe_load(shown.stdout)["spec"]["replicatedJobs"]
        for number in range(job["template"]["spec"]["completions"])
    }


def expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


@contextmanager
def running_pods(containers, folder: Path, num_others: int):
    """Start all pods, at addresses behind those of `num_others` hosts; yields (host, process)."""
    folder.mkdir()
    names = [*(f"other{number}" for number in range(num_others)), *containers]
    with running_hosts(folder, names) as hosts:
        known = [f"{host.address} {host.name}.{JOBSET} {host.name}\n" for host in hosts]
        hosts[0].known.write_text("".join(["127.0.0.1 localhost\n", *known]))
        started = []
        for host in hosts[num_others:]:
            [container] = containers[host.name]["containers"]
            variables = {
                each["name"]: each.get("value", host.address) for each in container["env"]
            } | {"JOB_COMPLETION_INDEX": host.name.rpartition("-")[2]}
            command = [expanded(each, variables) for each in container["command"]]
            environment = ENVIRONMENT | variables
            environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
            log = folder / f"{host.name}.log"
            started.append((host, host.start(*command, log=log, environment=environment)))
        yield started


def test_a_run_in_pods_is_stopped_and_resumes_at_other_addresses(
    containers, one_host, hosts, tmp_path
):
    assert [*containers] == ["tiny-ranks-0-0", "tiny-ranks-0-1", "tiny-engines-0-0"]
    run_dir = tmp_path / "run"
    with running_pods(containers, tmp_path / "first", num_others=0) as pods:
        assert wait_until(lambda: 1 in steps_of(run_dir), 120), logs(tmp_path / "first")
        for host, _ in pods:  # all at once, as for `kubectl delete`
            host.run("pkill", "-TERM", "-f", "^(bash -c trap|.*megatron-grpo train)")
        codes = [process.wait(60) for _, process in pods]
        assert codes == [75, 75, 143], logs(tmp_path / "first")
    with running_pods(containers, tmp_path / "second", num_others=1) as pods:
        codes = [process.wait(120) for _, process in pods[:2]]
        assert codes == [0, 0], logs(tmp_path / "second")
    assert_same_run(run_dir, one_host("data"))


def logs(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log"))
