"""Decisions of the functions in slurm/job.sh, tested fast with stand-ins for Slurm's commands."""

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from helpers.runs.slurm_cluster import REPOSITORY
from helpers.runs.slurm_jobs import VENV

SOURCED = "source slurm/job.sh; NETWORK_INTERFACE=${NETWORK_INTERFACE:-};"


@pytest.fixture
def bash(tmp_path):
    """A function: run a script after `source slurm/job.sh`; `programs` come first in PATH."""

    def bash(
        script: str, programs: dict[str, str], **variables: str
    ) -> subprocess.CompletedProcess:
        folder = tmp_path / "programs"
        folder.mkdir()
        for name, text in programs.items():
            (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (folder / name).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "SLURM_JOB_ID": "7",
            "VENV": str(VENV),
        }
        return subprocess.run(
            ["bash", "-c", SOURCED + script],
            cwd=REPOSITORY,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=30,
        )

    return bash


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("unset SLURM_SUBMIT_DIR; bash slurm/grpo_8b.sh", "submit this by sbatch, in the checkout"),
        ("SLURM_SUBMIT_DIR=/nowhere bash slurm/grpo_8b.sh", "/nowhere/slurm/job.sh: No such file"),
        (
            "source slurm/env.sh; VENV=/nowhere; step true",
            "/nowhere has no megatron-grpo: set VENV",
        ),
    ],
    ids=["not by sbatch", "in another folder", "without an environment"],
)
def test_a_wrongly_submitted_job_ends_with_one_line(bash, script, message):
    done = bash(script, {"srun": "echo started"})
    assert done.returncode != 0
    assert not done.stdout
    [line] = done.stderr.splitlines()
    assert message in line


PLACED = """
    place_job() { RUN_DIR=$RUN LOGS=$RUN/logs; }
    mount_run_dir() { :; }
"""
CONCLUDE = """
    LOGS="" RUN_DIR="" GUARD="" was_cancelled="" ENDS=$FOLDER/ends
    code=$CODE
    conclude
"""


@pytest.mark.parametrize(
    ("code", "starts_before", "is_queued"),
    [("0", "0", False), ("1", "0", True), ("75", "0", True), ("2", "0", False), ("2", "1", True)],
)
def test_a_mistake_is_final_only_on_the_first_start(bash, tmp_path, code, starts_before, is_queued):
    """After a restart the job has worked before, so a file system may be unavailable."""
    done = bash(
        CONCLUDE,
        {"scontrol": 'echo "$*"'},
        FOLDER=str(tmp_path),
        CODE=code,
        SLURM_RESTART_COUNT=starts_before,
    )
    assert done.stdout == ("requeue 7\n" if is_queued else "")
    assert done.returncode == (0 if is_queued else int(code))


def test_an_unreachable_controller_is_called_again(bash, tmp_path):
    away = f'[[ -e {tmp_path}/asked ]] && echo "$*" || {{ touch {tmp_path}/asked; exit 1; }}'
    programs = {"scontrol": away, "sleep": ""}
    done = bash(CONCLUDE, programs, FOLDER=str(tmp_path), CODE="75", SLURM_RESTART_COUNT="0")
    assert (done.stdout, done.returncode) == ("requeue 7\n", 0)


@pytest.mark.parametrize("step", ["mount_run_dir", "make_token", "start_trainer"])
def test_a_job_with_a_failed_start_is_queued_again(bash, tmp_path, step):
    script = PLACED + f"{step}() {{ return 1; }}; run_job"
    done = bash(script, {"scontrol": 'echo "$*"'}, RUN=str(tmp_path))
    assert done.stdout == "requeue 7\n"
    assert "exit code 1: queued again" in done.stderr


def test_a_signal_before_the_trainers_start_reaches_it(bash, tmp_path):
    starts = """
        start_trainer() {
            kill -USR1 $$
            (trap 'exit 75' USR1; for i in {1..100}; do sleep 0.1; done) >/dev/null 2>&1 &
            TRAINER=$!
        }
        conclude() { exit "$code"; }
        run_job
    """
    assert bash(PLACED + starts, {}, RUN=str(tmp_path)).returncode == 75


# This trainer ignores the signal, since it is saving.
SLOW_SAVE = """
    start_trainer() {
        (trap '' USR1; touch $RUN/begun; exec sleep $SAVES >/dev/null 2>&1) &
        TRAINER=$!
        until [[ -e $RUN/begun ]]; do sleep 0.1; done
        kill -USR1 $$
    }
    run_job
"""


@pytest.mark.parametrize(
    ("saves", "left", "is_left"),
    [(25, 8, True), (1, 600, False)],
    ids=["beyond the time limit", "before it, and nobody waits for the guard"],
)
def test_a_save_is_left_before_the_time_limit(bash, tmp_path, saves, left, is_left):
    """A trainer saves for `saves` seconds, `left` seconds before the limit."""
    squeue = f"echo $(($(date +$SLURM_TIME_FORMAT) + {left}))"
    programs = {"squeue": squeue, "scontrol": 'echo "$*"'}
    done = bash(PLACED + SLOW_SAVE, programs, RUN=str(tmp_path), SAVES=str(saves))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("requeue 7\n" if is_left else "")
    assert ("--signal" in done.stderr) == is_left


GUARD = """
    GUARD=""
    trap 'echo signalled' USR2
    guard_the_end
    wait "$GUARD" || true
"""


@pytest.mark.parametrize(("left", "waits"), [(119, 59), (123, 63)])
def test_guard_waits_until_a_minute_before_the_limit(bash, left, waits):
    programs = {"date": "echo 1000", "squeue": f"echo {1000 + left}", "sleep": 'echo "$1"'}
    assert bash(GUARD, programs).stdout == f"{waits}\nsignalled\n"


AWAIT_TRAINER = """
    got_signal=$GOT_SIGNAL
    (kill -USR1 "$BASHPID") &
    TRAINER=$!
    await_trainer
    echo "$code"
"""


@pytest.mark.parametrize(("got_signal", "code"), [("yes", 75), ("", 128 + signal.SIGUSR1)])
def test_await_trainer_takes_a_death_by_the_signal_for_75(bash, got_signal, code):
    """The trainer had not yet installed its handler."""
    assert bash(AWAIT_TRAINER, {}, GOT_SIGNAL=got_signal).stdout == f"{code}\n"


ADDRESS_OF = "address_of n1"
NODE = 'echo "NodeName=n1 NodeAddr=$NODE_ADDRESS NodeHostName=n1"'
OF_INTERFACE = """
[[ " $* " != *" dev ib0 "* ]] || echo "5: ib0    inet 10.1.0.5/16 scope global ib0"
[[ " $* " != *" global "* ]] || echo "2: eth0    inet 192.0.2.5/24 scope global eth0"
"""


@pytest.mark.parametrize(
    ("name", "resolved", "interface", "expected"),
    [
        ("n1", ["10.0.0.1"], "", "10.0.0.1"),
        ("n1", ["127.0.1.1", "10.0.0.1"], "ib0", "10.0.0.1"),
        ("n1", ["127.0.1.1"], "", "192.0.2.5"),
        ("n1", ["127.0.1.1"], "ib0", "10.1.0.5"),
        ("127.0.0.1", ["127.0.0.1"], "", "127.0.0.1"),
        ("n1", ["::1", "fd00::5"], "without IPv4", "fd00::5"),
    ],
)
def test_a_node_has_an_address_that_others_reach(bash, name, resolved, interface, expected):
    answer = "\n".join(f"{address}       STREAM {name}" for address in resolved)
    family = "ahostsv6" if ":" in answer else "ahostsv4"
    getent = f"[[ $1 == {family} ]] && echo '{answer}'"
    programs = {"scontrol": NODE, "getent": getent, "ip": OF_INTERFACE}
    done = bash(ADDRESS_OF, programs, NODE_ADDRESS=name, NETWORK_INTERFACE=interface)
    assert done.stdout == f"{expected}\n", done.stderr


def test_a_node_without_a_known_name_is_named(bash):
    done = bash(ADDRESS_OF, {"scontrol": NODE, "getent": "exit 2"}, NODE_ADDRESS="n1")
    assert done.returncode != 0 and done.stdout == ""
    assert "no address of node n1 is known" in done.stderr


START_TRAINER = """
    address_of() { echo "10.0.0.${1#n}"; }
    step() { until [[ $1 == bash ]]; do shift; done; SLURM_PROCID=2 "$@"; }
    NODES=(n1 n2 n3) FIRST_PORT=20000 LOGS=logs GPUS_PER_NODE=8
    start_trainer CONFIG.yaml "data.path=a  b"
    wait
"""


def test_start_trainer_runs_train_on_each_node_with_its_number_and_address(bash):
    done = bash(START_TRAINER, {"megatron-grpo": "printf '%s|' \"$@\""})
    options = "--nnodes|3|--master-addr|10.0.0.1|--master-port|20000|--gpus-per-node|8"
    own = "--log-dir|logs|--node-rank|2|--local-addr|10.0.0.3|"
    assert done.stdout == f"train|CONFIG.yaml|data.path=a  b|{options}|{own}"


START_ENGINES = """
    source <(sed -n '/^start_engines()/,/^}/p' slurm/engines.sh)
    address_of() { echo "$1"; }
    step() { echo "$*"; }
    FIRST_PORT=20000 LOGS=logs urls=() engines=() engine_logs=()
    PLACED=$(sed 's/^/engine /' <<<"$PLACED")
    start_engines
    wait
    echo "${urls[@]}" >&2
"""


def test_ports_of_80_engines_are_among_the_jobs_64(bash):
    """Ports belong to a node, and no node has 80 engines."""
    placed = [f"n{node} {gpu},{gpu + 1}" for node in range(20) for gpu in range(0, 8, 2)]
    done = bash(START_ENGINES, {}, PLACED="\n".join(placed))
    addresses = re.findall(r"engine_\d+.log (\S+) --port (\d+)", done.stdout)
    assert len(set(addresses)) == 80
    assert {f"http://{host}:{port}" for host, port in addresses} == set(done.stderr.split())
    assert {int(port) for _, port in addresses} == {20001, 20003, 20005, 20007}


def test_an_engine_over_nodes_is_a_step_that_ends_on_all_of_them(bash):
    placed = "n0,n1 0,1,2,3,4,5,6,7\nn2,n3 0,1,2,3,4,5,6,7"
    done = bash(START_ENGINES, {}, PLACED=placed)
    assert done.stderr == "http://n0:20001 http://n2:20001\n"
    steps = re.findall(
        r"--nodes=2 --ntasks=2 .* --nodelist=(\S+) --kill-on-bad-exit=1 .*"
        r" (\S+) --port 20001 --master-port 20063",
        done.stdout,
    )
    assert sorted(steps) == [("n0,n1", "n0,n1"), ("n2,n3", "n2,n3")]


def test_a_run_directory_may_have_spaces(bash):
    placed = "run_dir /scratch/my runs/a  b\ntrainer n0"
    done = bash(
        'on_node() { echo "$PLACED"; }; place_job && echo "$RUN_DIR" "$LOGS"',
        {"scontrol": "echo n0"},
        PLACED=placed,
        GPUS_PER_NODE="8",
        SLURM_JOB_NODELIST="n0",
    )
    run = Path("/scratch/my runs/a  b")
    assert done.stdout == f"{run} {run}/logs/slurm_7_0\n"


ENGINE = "bash slurm/engine.sh $LOGS/engine_0.log n0,n1"
LEAVES_A_FILE = """
echo "$TMPDIR"
stat --format=%a "$TMPDIR"
touch "$TMPDIR/socket"
"""


# An srun that runs the command of `place`, keeps its output and ends the job.
PLACES = """
until [[ $1 == megatron-grpo ]]; do shift; done
"$@" >$RUN/placed
exit 2
"""


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (REPOSITORY / "slurm").glob("grpo_*.sh"))
)
def test_scripts_fill_the_nodes_of_their_headers(bash, tmp_path, script):
    header = (REPOSITORY / "slurm" / script).read_text()
    nodes = [f"n{number}" for number in range(int(re.findall("#SBATCH --nodes=(.*)", header)[0]))]
    programs = {"scontrol": "printf '%s\\n' $SLURM_JOB_NODELIST", "srun": PLACES}
    variables = {"SLURM_JOB_NODELIST": " ".join(nodes), "GPUS_PER_NODE": "8", "RUN": str(tmp_path)}
    done = bash(f"bash slurm/{script}", programs, **variables)
    assert done.returncode == 2, done.stderr
    placed = (tmp_path / "placed").read_text()
    assert {*",".join(re.findall("^(?:trainer|engine) (\\S+)", placed, re.M)).split(",")} == {
        *nodes
    }


@pytest.mark.parametrize("name", ["short", "long" * 20])
def test_engines_leave_nothing_in_the_temporary_folder(bash, tmp_path, name):
    with tempfile.TemporaryDirectory() as short:
        place = Path(short) / name
        place.mkdir()
        variables = {"LOGS": str(tmp_path), "TMPDIR": str(place), "SLURM_NODEID": "0"}
        done = bash(ENGINE, {"megatron-grpo": LEAVES_A_FILE}, **variables)
        folder, mode = done.stdout.split()
        assert Path(folder).parent == (place if name == "short" else Path("/tmp"))
        assert mode == "700" and not Path(folder).exists()


def test_a_further_node_of_an_engine_has_its_own_log_and_address(bash, tmp_path):
    programs = {"megatron-grpo": 'echo "$*"'}
    bash(ENGINE, programs, LOGS=str(tmp_path), SLURM_NODEID="1")
    expected = "serve --host n1 --nnodes 2 --node-rank 1 --master-addr n0\n"
    assert (tmp_path / "engine_0_node_1.log").read_text() == expected


@pytest.mark.parametrize(
    ("does", "code"),
    [("exit 0", 3), ("exit 2", 2), ("kill -TERM $PPID; exec sleep 60", 0)],
    ids=["ends", "is refused", "gets a signal"],
)
def test_engine_sh_ends_the_step_on_its_other_nodes(bash, tmp_path, does, code):
    """Slurm ends a step if the exit code of a task is not 0, and returns the highest code."""
    programs = {"megatron-grpo": does}
    assert bash(ENGINE, programs, LOGS=str(tmp_path), SLURM_NODEID="0").returncode == code


@pytest.mark.parametrize(
    ("variables", "printed", "expected"),
    [
        ({}, "$GPUS_PER_NODE", "8"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": "h100:4"}, "$GPUS_PER_NODE", "4"),
        ({"SLURM_GPUS_PER_NODE": "4", "GPUS_PER_NODE": "2"}, "$GPUS_PER_NODE", "2"),
        ({}, "$PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "of_the_site"}, "$PYTORCH_CUDA_ALLOC_CONF", "of_the_site"),
        # Kernels are compiled on the node's own disk, by a few processes at a time.
        ({}, "$TRITON_CACHE_DIR", f"/tmp/megatron-grpo-{os.getuid()}/triton"),
        ({"NODE_CACHE": "/nvme"}, "$TORCHINDUCTOR_CACHE_DIR", "/nvme/inductor"),
        ({"VLLM_CACHE_ROOT": "/of/the/site"}, "$VLLM_CACHE_ROOT", "/of/the/site"),
        ({}, "$TORCHINDUCTOR_COMPILE_THREADS", "4"),
        # The hub's token is not next to its caches.
        ({}, "${HF_HOME-none} $HF_HUB_CACHE", f"none {REPOSITORY}/.cache/huggingface/hub"),
    ],
)
def test_the_environment_comes_from_the_job_and_the_site(bash, variables, printed, expected):
    own = {"HF_HOME", "HF_HUB_CACHE", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR"}
    own |= {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}  # also set by torch
    unset = " ".join(own - variables.keys())
    script = f'unset {unset}; source slurm/env.sh; echo "{printed}"'
    assert bash(script, {}, **variables).stdout == f"{expected}\n"


# An engine that joins at once, and ends like engine.sh after its run has dropped it.
JOINS = """
[[ "$*" != *" megatron-grpo place "* ]] || { echo "$PLACED"; exit; }
port=$(sed 's/.* --port \\([0-9]*\\) .*/\\1/' <<<"$*")
echo "$*" >>"$RUN/steps"
touch "$RUN/engines/10.0.0.1_$port.json"
until [[ -e $RUN/engines/10.0.0.1_$port.leaving ]]; do sleep 0.1; done
exit 3
"""
ENGINES_JOB = """
    bash slurm/engines.sh $RUN rollout.vllm.max_num_seqs=8 &
    until [[ $(ls $RUN/engines | wc -l) == 2 ]]; do sleep 0.1; done
    $LEAVES
    wait $!
"""


@pytest.mark.parametrize(
    "leaves",
    ["kill -USR1 $!", "for file in $RUN/engines/*; do mv $file ${file%.json}.leaving; done"],
    ids=["before the time limit", "when its files say so"],
)
def test_a_job_of_engines_joins_a_run_and_leaves_it(bash, tmp_path, leaves):
    run = tmp_path / "run"
    (run / "engines").mkdir(parents=True)
    placed = f"run_dir {run}\nengine n1 0\nengine n1 1"
    scontrol = f'[[ "$2" == hostnames ]] && echo n1 || {NODE}'
    programs = {"scontrol": scontrol, "srun": JOINS, "getent": "echo 10.0.0.1 STREAM n1"}
    variables = {"PLACED": placed, "RUN": str(run), "NODE_ADDRESS": "n1"}
    variables |= {"MEGATRON_GRPO_TOKEN": "of-both-jobs", "SLURM_JOB_NODELIST": "n1"}
    done = bash(ENGINES_JOB.replace("$LEAVES", leaves), programs, **variables)
    assert done.returncode == 0, done.stderr
    steps = (run / "steps").read_text().splitlines()
    assert len(steps) == 2
    assert all(
        f" {run}/config.yaml rollout.vllm.max_num_seqs=8 --join --port " in step for step in steps
    )
    left = {file.name for file in (run / "engines").iterdir()}
    assert left == {"10.0.0.1_20449.leaving", "10.0.0.1_20450.leaving"}


def test_a_job_of_engines_needs_the_token_of_the_run(bash, tmp_path):
    done = bash("bash slurm/engines.sh $RUN", {}, RUN=str(tmp_path), MEGATRON_GRPO_TOKEN="")
    assert done.returncode != 0
    assert "MEGATRON_GRPO_TOKEN: export the one that the job of the run" in done.stderr


@pytest.mark.parametrize(
    ("given", "made"), [("of-both-jobs", "of-both-jobs"), ("", r"[0-9a-f]{64}")]
)
def test_a_job_has_its_submitted_token_or_a_new_one(bash, given, made):
    done = bash('make_token; echo "$MEGATRON_GRPO_TOKEN"', {}, MEGATRON_GRPO_TOKEN=given)
    assert re.fullmatch(made, done.stdout.strip())
