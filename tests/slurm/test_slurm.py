"""The scripts of slurm/ on a real Slurm, with the tiny config on two nodes.

Jobs without interaction run in the background, since they mostly wait for Slurm.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.engines.live import SGLANG_PYTHON
from helpers.runs.slurm_cluster import NODE_MEGABYTES, PACKAGES, REPOSITORY, Job, is_installed
from helpers.runs.slurm_jobs import VENV, submitter
from helpers.runs.train import TINY_CONFIG

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason=f"needs Slurm: apt-get install {PACKAGES}"),
    pytest.mark.timeout(600),  # CI runs other tests at the same time
]


SGLANG = ["rollout.engine=sglang", f"rollout.python={SGLANG_PYTHON}"]
OF_SGLANG = pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="`make setup-sglang` makes it")
KILLS_RANK_0 = """
import psutil
def reward(completions, **_):
    psutil.Process().parents()[1].kill()
"""
SLOW = """
import time
def reward(completions, **_):
    time.sleep(1)
    return [float(len(text)) for text in completions]
"""
# `place` fails in the first two restarts: failures without a run directory count, too.
FAILS_BETWEEN = """
case $1/$SLURM_RESTART_COUNT in
    place/1 | place/2) exit 7 ;;
esac
"""


@pytest.fixture(scope="module")
def background(cluster, tied_model, tmp_path_factory):
    """Jobs in the background of the tests, keyed by their fate."""
    mistake, trainer, early = map(tmp_path_factory.mktemp, ("mistake", "trainer", "early"))
    rewards = trainer / "rewards.py"
    rewards.write_text(KILLS_RANK_0)
    reward = f"reward.functions=[{rewards}:reward]"
    with submitter(cluster, tied_model) as submit:
        yield {
            "a mistake": submit("reward.functions=[/nowhere.py:reward]", folder=mistake),
            "the trainer fails": submit(
                reward, folder=trainer, venv=venv_that(FAILS_BETWEEN, trainer)
            ),
            "place fails": submit(folder=early, venv=venv_that("exit 7", early)),
        }


@pytest.fixture(scope="module")
def endless(cluster, tied_model, tmp_path_factory):
    """A job without an end that makes a step each second."""
    with submitter(cluster, tied_model) as submit:
        folder = tmp_path_factory.mktemp("endless")
        (folder / "rewards.py").write_text(SLOW)
        slow = f"reward.functions=[{folder / 'rewards.py'}:reward]"
        run = submit(slow, "train.num_steps=5000", folder=folder)
        run.await_step(1)
        yield run


def test_a_mistake_is_reported_and_not_retried(background):
    run = background["a mistake"]
    ended = run.job.await_state("FAILED", seconds=300)
    assert ended["ExitCode"] == "2:0", run.logs()
    assert ended["Restarts"] == "0"
    assert "/nowhere.py" in run.job.output()


def test_engines_run_on_the_node_that_ranks_leave_free(submit):
    arguments = ["rollout.num_engines=2", "parallel.pipeline_parallel_size=1"]
    run = submit(*arguments, ranks_per_node=2)
    nodes = [engine.environ()["SLURMD_NODENAME"] for engine in run.await_engines(2)]
    _, second = run.job.nodes()
    run.job.cancel()
    assert nodes == [second, second]
    assert run.await_silence() == []


def test_an_engine_that_does_not_answer_in_time_is_named(submit):
    # Its imports take longer than 1 s on any machine.
    run = submit("rollout.startup_timeout=1")
    run.await_words("did not answer within 1 s (rollout.startup_timeout); ", 120)
    assert "engine_0.log ends with" in run.job.output()
    run.await_words("exit code 1: queued again")
    run.job.cancel()
    assert run.await_silence() == []


def test_an_engine_that_ends_is_reported_while_another_hangs(submit):
    run = submit("rollout.num_engines=2")
    first, second = run.await_engines(2)
    first.suspend()
    second.kill()
    run.await_words("ended with signal SIGKILL; ")
    assert f"{run.run_dir}/logs/slurm_{run.job.number}_0/engine_1.log" in run.job.output()
    run.job.cancel()
    assert run.await_silence() == []


@pytest.mark.parametrize(
    "engine",
    [[], pytest.param(SGLANG, marks=[OF_SGLANG, pytest.mark.slow])],
    ids=["vllm", "sglang"],
)
def test_job_signalled_saves_queues_again_and_ends(submit, engine):
    run = submit(*engine, "train.num_steps=6", ranks_per_node=2)
    run.await_step(2)
    run.job.signal("USR1")
    run.await_end()
    assert run.restarts() == 1, run.logs()
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    second_start = re.split(r"exit code 75|JOB REQUEUE \*\*\*", run.job.output())[-1]
    assert not re.search("error|killed|cancelled", second_start, re.IGNORECASE), second_start
    logs = sorted(path.name for path in run.run_dir.glob("logs/slurm_*_0/*.log"))
    assert logs == ["engine_0.log", "trainer_0.log", "trainer_1.log"]
    assert "this engine" not in run.logs()  # it has stayed


@pytest.mark.timeout(1000)  # two starts of an engine may take 700 s on a busy machine
@pytest.mark.parametrize(
    ("engine", "modules"),
    [
        pytest.param(
            [],
            ("vllm.entrypoints.openai.api_server", "megatron_grpo.engines.vllm.headless"),
            id="vllm",
        ),
        pytest.param(
            SGLANG,
            ("megatron_grpo.engines.sglang.server",),
            id="sglang",
            marks=[OF_SGLANG, pytest.mark.slow],
        ),
    ],
)
def test_an_engine_over_two_nodes_is_started_again_on_both(submit, engine, modules):
    """The engine has two GPUs, and each node has one."""
    run = submit(*engine, "rollout.tensor_parallel_size=2", "train.num_steps=5000")
    run.await_step(2, seconds=400)
    before = [process for module in modules for process in run.processes_of(module)]
    assert [process.environ()["SLURMD_NODENAME"] for process in before] == run.job.nodes()
    before[1].kill()
    run.await_step(run.steps()[-1] + 3)
    after = [process for module in modules for process in run.processes_of(module)]
    assert len(after) == 2 and not set(before) & set(after)
    assert run.restarts() == 0, run.logs()
    log = run.run_dir / "logs" / f"slurm_{run.job.number}_0" / "engine_0.log"
    assert log.read_text().count("is started again in 0 s") == 1
    run.job.cancel()
    assert run.await_silence() == []


def test_engine_that_dies_is_started_again_by_its_job(endless):
    restarts = endless.restarts()
    [engine] = endless.engines()
    engine.kill()
    engine.wait(60)
    endless.await_step(endless.steps()[-1] + 3)
    [again] = endless.engines()
    assert again.pid != engine.pid
    assert endless.restarts() == restarts, endless.logs()
    assert "signal SIGKILL, and is started again" in endless.logs()


def test_a_job_that_loses_a_node_is_queued_again_and_resumes(cluster, endless):
    restarts = endless.restarts()
    endless.await_step(2)
    _, second = endless.job.nodes()
    cluster.kill_daemon(second)
    endless.await_restart(restarts + 1)
    cluster.start_daemon(second)
    endless.await_step(endless.steps()[-1] + 2)
    steps = endless.steps()
    assert steps == list(range(1, steps[-1] + 1)), endless.logs()


def test_a_cancelled_job_leaves_nothing_and_does_not_come_back(endless):
    """Must be the last test that uses this job."""
    restarts = endless.restarts()
    endless.job.cancel()
    ended = endless.job.await_state("CANCELLED", seconds=150)
    assert int(ended["Restarts"]) == restarts, endless.logs()
    assert endless.await_silence() == []
    # A requeued job is PENDING at once, however long it has to wait.
    assert endless.job.state == "CANCELLED"


def test_another_job_has_its_restarts_before_it(background, submit):
    run = background["place fails"]
    assert run.job.await_state("FAILED", seconds=300)["Restarts"] == "3"
    assert "4 starts in a row ended at the same place (no checkpoint)" in run.job.output()
    submit(folder=run.folder, venv=run.venv).await_restart()


def test_three_restarts_without_progress_are_the_end(background):
    run = background["the trainer fails"]
    ended = run.job.await_state("FAILED", seconds=300)
    assert ended["Restarts"] == "3", run.logs()
    assert run.job.output().count("exit code 7: queued again") == 2
    assert "4 starts in a row ended at the same place (no checkpoint)" in run.job.output()
    assert run.await_silence() == []


def venv_that(does: str, folder: Path) -> Path:
    """A virtual environment with a `megatron-grpo` that runs `does` first."""
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    megatron_grpo = f'#!/bin/sh\n{does}\nexec {VENV}/bin/megatron-grpo "$@"\n'
    (programs / "megatron-grpo").write_text(megatron_grpo)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return programs.parent


def test_a_conversion_is_a_job(cluster, tied_model, tmp_path):
    arguments = ["import", "--hf", str(tied_model), "--out", str(tmp_path / "converted")]
    job = cluster.submit("convert.sh", tmp_path / "job.log", arguments, VENV=str(VENV))
    job.await_state("COMPLETED", seconds=120)
    assert (tmp_path / "converted" / ".metadata").exists()


def test_the_doctor_sees_every_host(cluster, tmp_path):
    arguments = [str(TINY_CONFIG), f"train.run_dir={tmp_path}"]
    job = cluster.submit("doctor.sh", tmp_path / "job.log", arguments, VENV=str(VENV))
    ended = job.await_state("COMPLETED", "FAILED", seconds=150)
    assert ended["JobState"] == "COMPLETED", job.output()
    assert re.search(r"clock skew .* between 2 hosts", job.output())


@pytest.mark.parametrize(
    "script",
    ["grpo_70b.sh", "grpo_70b_lora.sh", "grpo_70b_one_node.sh", "convert.sh", "doctor.sh"],
)
def test_a_job_has_all_memory_of_its_nodes(cluster, script, tmp_path):
    options = ["--parsable", "--hold", "--nodes=2", f"--output={tmp_path}/job.log"]
    job = Job(cluster, cluster.run("sbatch", *options, f"slurm/{script}"), tmp_path / "job.log")
    resources = job.fields()["TRES"]
    job.cancel()
    assert f"mem={2 * NODE_MEGABYTES}M" in resources


def test_step_has_all_cores_of_nodes_that_differ(cluster, tmp_path):
    """The first node has 8 cores and 8 GPUs, the other 6 cores and the 4 GPUs of a request."""
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    script.write_text(
        "#!/usr/bin/env bash\n"
        "source slurm/job.sh; source slurm/env.sh\n"
        "echo $GPUS_PER_NODE GPUs per node\n"
        "step --nodes=2 --ntasks=2 --ntasks-per-node=1 bash -c "
        "'echo $SLURMD_NODENAME: $SLURM_CPUS_ON_NODE cores, $SLURM_GPUS_ON_NODE GPUs'\n"
    )
    options = ["--partition=unlike", "--nodes=2", "--exclusive", "--mem=0", "--gpus-per-node=4"]
    submitted = cluster.run("sbatch", "--parsable", *options, f"--output={log}", str(script))
    job = Job(cluster, submitted, log)
    job.await_state("COMPLETED", "FAILED", seconds=120)
    expected = {"4 GPUs per node", "large: 8 cores, 4 GPUs", "small: 6 cores, 4 GPUs"}
    assert expected <= set(job.output().splitlines()), job.output()


def test_all_scripts_are_clean():
    scripts = sorted(map(str, (REPOSITORY / "slurm").glob("*.sh")))
    checked = subprocess.run(
        ["shellcheck", "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
