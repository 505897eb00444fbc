import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_failure_policy_rule import (
    JobsetV1alpha2FailurePolicyRule,
)
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from typer.main import get_group
from typer.testing import CliRunner

from helpers.models.published import write_config
from megatron_grpo.cli import app
from megatron_grpo.config.file import load_config
from megatron_grpo.engines.arguments import EngineNode
from megatron_grpo.engines.server import serve
from megatron_grpo.launch.kubernetes import KEPT

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
RUNS = {
    "grpo_70b": ("--nodes=8", "--resource=rdma/ib=1", "--queue=research"),
    "grpo_235b_a22b": ("--nodes=32",),
    "grpo_671b_a37b": ("--nodes=32", "--gpu=h200"),
    "grpo_405b": ("--nodes=4", "--only-engines"),
}
SHAPES = {
    "Llama-3.3-70B-Instruct": "Llama-3.3-70B",
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen3-235B-A22B",
    "DeepSeek-V3": "DeepSeek-V3",
}


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """A working directory with the configs, and of the models their config.json."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    for folder, name in SHAPES.items():
        write_config(Path("models", folder), name)


def place(*options):
    return CliRunner().invoke(app, ["place", *options])


def jobset_of(config, *options):
    shown = place(
        f"configs/{config}.yaml", "--kubernetes", "--image=registry/image:1",
        "--volume=shared:/shared", *(options or RUNS[config]),
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    return yaml.safe_load(shown.stdout)


def lost(given, known):
    """Paths of `given` that are not in `known`."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            yield from (f"{key}.{path}" for path in lost(value, known.get(key)))
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for value, other in zip(given, known, strict=True):
            yield from lost(value, other)
    elif given != known:
        yield ""


def unknown_fields(jobset):
    """Fields that JobSet's published schema does not have; ValueError for values of wrong types."""
    return [*lost(jobset, JobsetV1alpha2JobSet.from_dict(jobset).to_dict())]


def pods_of(jobset):
    """(replicas, pods of a Job, container) of each replicated Job, by name."""
    return {
        job["name"]: (
            job["replicas"],
            job["template"]["spec"]["completions"],
            job["template"]["spec"]["template"]["spec"]["containers"][0],
        )
        for job in jobset["spec"]["replicatedJobs"]
    }


def hosts_of(jobset):
    """The DNS names of all pods, as the fields of JobSet's `Network` describe them."""
    name = jobset["metadata"]["name"]
    return {
        f"{name}-{job}-{job_index}-{pod_index}.{name}"
        for job, (replicas, num_pods, _) in pods_of(jobset).items()
        for job_index in range(replicas)
        for pod_index in range(num_pods)
    }


@pytest.mark.parametrize("config", RUNS)
def test_a_manifest_is_valid_by_the_published_schema(config):
    jobset = jobset_of(config)
    assert unknown_fields(jobset) == []
    actions = JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
    assert jobset["spec"]["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    assert all(rule["action"] in actions for rule in jobset["spec"]["failurePolicy"]["rules"])
    for host in hosts_of(jobset):
        pod, service = host.split(".")
        assert all(re.fullmatch("[a-z][-a-z0-9]{0,62}", each) for each in (f"{pod}-abcde", service))


def test_a_misspelt_field_is_not_valid():
    jobset = jobset_of("grpo_70b")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert unknown_fields(jobset) == ["spec.replicatedJobs.template.spec.backofLimit."]
    jobset["spec"]["failurePolicy"]["maxRestarts"] = "three"
    with pytest.raises(ValueError, match="maxRestarts"):
        unknown_fields(jobset)


@pytest.mark.parametrize(
    ("config", "jobs"),
    [
        ("grpo_70b", {"ranks": (1, 8, 8)}),  # engines share the ranks' GPUs: `train` starts them
        ("grpo_235b_a22b", {"ranks": (1, 16, 8), "engines": (1, 32, 4)}),
        ("grpo_671b_a37b", {"ranks": (1, 16, 8), "engines": (8, 2, 8)}),  # an engine has two nodes
        ("grpo_405b", {"engines": (2, 2, 8)}),  # engines that join
    ],
)
def test_ranks_and_engines_reach_each_other_by_the_names_of_their_pods(config, jobs):
    jobset = jobset_of(config)
    pods = pods_of(jobset)
    assert jobs == {
        name: (*job[:2], job[2]["resources"]["limits"]["nvidia.com/gpu"])
        for name, job in pods.items()
    }
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == [next(iter(jobs))]
    hosts = hosts_of(jobset)
    for name, (replicas, _, container) in pods.items():
        command = shlex.join(container["command"])
        # Kueue (waitForPodsReady) would evict engines that load weights.
        assert "readinessProbe" not in container
        for index in range(replicas):
            masters = re.findall(r"--master-addr=([\w$().-]+)", command)
            assert {each.replace("$(JOB_INDEX)", str(index)) for each in masters} <= hosts, name
    urls = re.findall(r"http://([\w.-]+):8000", str(pods.get("ranks")))
    assert len({*urls}) == len(urls) and {*urls} <= hosts
    has_urls = {"ranks", "engines"} <= jobs.keys()
    assert len(urls) == (load_config(Path(f"configs/{config}.yaml")).num_engines if has_urls else 0)


def answer(jobset, job, end):
    """The action that answers `end` of a pod of the replicated job numbered `job`."""
    # What Kubernetes 1.31 and JobSet 0.10 make of it: pkg/controller/job/pod_failure_policy.go and
    # pkg/controllers/failure_policy.go.
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    spec = jobset["spec"]["replicatedJobs"][job]["template"]["spec"]
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {}).get("values", [])
        conditions = [each["type"] for each in rule.get("onPodConditions", [])]
        if end in codes:
            message = f"Container a for pod a/b failed with exit code {end} matching FailJob"
        elif end in conditions:
            message = f"Pod a/b has condition {end} matching FailJob rule at index 1"
        if end in codes or end in conditions:
            if rule["action"] != "FailJob":
                return rule["action"]
            reason = "PodFailurePolicy"
            break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("end", "action"),
    [
        (2, "FailJobSet"),
        (75, "RestartJobSetAndIgnoreMaxRestarts"),
        ("DisruptionTarget", "RestartJobSetAndIgnoreMaxRestarts"),  # a drained or preempted node
        (1, "RestartJobSet"),  # JobSet's default, up to maxRestarts
        (137, "RestartJobSet"),
        (12, "RestartJobSet"),
    ],
)
def test_the_end_of_a_rank_is_answered_as_by_slurm(end, action):
    assert answer(jobset_of("grpo_70b"), 0, end) == action


@pytest.mark.parametrize(("end", "action"), [(2, "FailJobSet"), ("DisruptionTarget", "Ignore")])
def test_a_mistake_of_an_engine_ends_the_run_and_its_move_does_not(end, action):
    assert answer(jobset_of("grpo_235b_a22b"), 1, end) == action


@pytest.mark.parametrize(("code", "kept"), [(0, 3), (1, 1), (2, 2)])
def test_the_job_of_an_engine_never_takes_its_end_for_success(code, kept):
    assert subprocess.run([*KEPT, "bash", "-c", f"exit {code}"]).returncode == kept


def test_sigterm_reaches_an_engine_and_waits_for_its_end(tmp_path):
    script = "trap 'echo ended; exit' TERM; echo started; while :; do sleep 0.1; done"
    engine = subprocess.Popen([*KEPT, "bash", "-c", script], stdout=subprocess.PIPE, text=True)
    assert engine.stdout.readline() == "started\n"
    engine.send_signal(signal.SIGTERM)
    out, _ = engine.communicate(timeout=60)
    assert (out, engine.returncode) == ("ended\n", 143)


def test_engines_smaller_than_a_node_get_their_part_of_its_resources():
    whole = {"nvidia.com/gpu": 8, "rdma/ib": "2", "memory": "1800Gi"}
    given = [f"--resource={key}={whole[key]}" for key in ("rdma/ib", "memory")]
    pods = pods_of(jobset_of("grpo_30b_a3b", "--nodes=8", *given, "--resource=cpu=180"))
    ranks, engines = (pods[name][2]["resources"] for name in ("ranks", "engines"))
    assert ranks == {"limits": whole, "requests": {"cpu": "180"}}
    half = {"nvidia.com/gpu": 4, "rdma/ib": "1", "memory": "900Gi"}
    assert engines == {"limits": half, "requests": {"cpu": "90"}}


@pytest.mark.parametrize("resource", ["rdma/ib=1", "memory=1.5Ti"])
def test_a_resource_without_a_whole_part_for_an_engine_is_refused(resource):
    config = ["configs/grpo_30b_a3b.yaml", "--kubernetes", "--image=i", "--volume=c:/c"]
    shown = place(*config, "--nodes=8", f"--resource={resource}")
    assert re.search(f"{resource} .* a multiple of 2", str(shown.exception))


def test_pods_run_commands_that_exist():
    for config in RUNS:
        for _, _, container in pods_of(jobset_of(config)).values():
            command = container["command"][container["command"].index("megatron-grpo") + 1 :]
            parameters = get_group(app).commands[command[0]].params
            known = {option for parameter in parameters for option in parameter.opts}
            given = {each.partition("=")[0] for each in command if each[:2] == "--"}
            assert given and given <= known


def test_the_commands_of_the_page_print_manifests():
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    commands = re.findall(r"megatron-grpo place (.+) \|", page)
    assert len(commands) == 4
    for command in commands:
        shown = place(*shlex.split(command))
        assert shown.exit_code == 0, (command, shown.output)
        assert unknown_fields(yaml.safe_load(shown.stdout)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["grpo.beta=0.04"], "GB in phase train, but may use"),  # a reference beside the weights
        (["--nodes=4"], "64 ranks need 8 nodes"),
        (["--name=Grpo"], "use small letters"),
        ([f"--name={'a' * 48}"], "63 characters at most"),
    ],
)
def test_nothing_is_printed_for_a_run_that_cannot_start(options, message):
    config = ["configs/grpo_70b.yaml", "--kubernetes", "--image=i", "--volume=c:/c", "--nodes=8"]
    shown = place(*config, *options)
    assert isinstance(shown.exception, ValueError)  # which `main` makes one message and code 2
    assert re.search(message, str(shown.exception)) and shown.stdout == ""


@pytest.mark.parametrize(
    "options",
    [
        ["--image=i", "--volume=c:/c"],
        ["--image=i", "--nodes=8"],
        ["--volume=c:/c", "--nodes=8"],
        ["--image=i", "--volume=c", "--nodes=8"],
    ],
)
def test_a_manifest_needs_an_image_a_volume_and_a_number_of_nodes(options):
    shown = place("configs/grpo_70b.yaml", "--kubernetes", *options)
    assert shown.exit_code == 2 and shown.stdout == ""


def test_serve_accepts_the_pods_of_an_engine_over_several_nodes(monkeypatch):
    cfg, node = load_config(ROOT / "configs" / "tiny_cpu.yaml"), EngineNode(2, 0, "127.0.0.1", 1)
    with pytest.raises(ValueError, match="spans nodes only where something ends it on all"):
        serve(cfg, "127.0.0.1", 0, "token", node)
    for variable in pods_of(jobset_of("grpo_671b_a37b"))["engines"][2]["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", ""))
    with pytest.raises(ValueError, match="each has an equal part of the engine"):
        serve(cfg, "127.0.0.1", 0, "token", node)
