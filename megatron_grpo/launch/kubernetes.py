"""A run on Kubernetes, as a JobSet: a Job of ranks, and Jobs of engines on nodes of their own.

Fields are those of JobSet 0.10 (jobset.x-k8s.io/v1alpha2) and of Jobs in Kubernetes 1.31.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, inf
from typing import Any

import yaml

from megatron_grpo.config.config import Config
from megatron_grpo.launch.placement import (
    NODES_VARIABLE,
    Placement,
    place,
    place_engines,
)
from megatron_grpo.launch.process import EXIT_PREEMPTED
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE

type Object = dict[str, Any]

EXIT_MISTAKE, MAX_RESTARTS = 2, 3
SAVE_SECONDS, END_SECONDS = 900, 60
"""After SIGTERM: for ranks to save, or engines to leave a run; for other engines to end."""
PORT = 8000
SECRET = "megatron-grpo"
HEAD = f"""\
# Once per namespace; {SECRET}.env also takes HF_TOKEN=... and other variables of the run:
#   echo {TOKEN_VARIABLE}=$(openssl rand -hex 32) >> {SECRET}.env
#   kubectl create secret generic {SECRET} --from-env-file={SECRET}.env && rm {SECRET}.env
"""
# vLLM ends with 0 after the death of a worker, and its Job would count it as completed.
KEPT = (
    "bash",
    "-c",
    "trap 'kill $engine; wait $engine; exit 143' TERM; "
    '"$@" & engine=$!; wait $engine; code=$?; [ $code = 0 ] && exit 3; exit $code',
    "engine",
)
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
_PATH = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
JOB_INDEX = {"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _PATH}}}
DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
MISTAKEN = {"onExitCodes": {"operator": "In", "values": [EXIT_MISTAKE]}}
SAVED = {"onExitCodes": {"operator": "In", "values": [EXIT_PREEMPTED]}}
TOGETHER: Object = {
    "backoffLimit": 0,
    "podFailurePolicy": {
        "rules": [{"action": "FailJob", **ends} for ends in (MISTAKEN, SAVED, DISRUPTED)]
    },
}
"""A Job whose pods end together, as the JobSet then does or not: `RESTARTS`."""
ALONE: Object = {
    "backoffLimitPerIndex": MAX_RESTARTS,
    "podFailurePolicy": {
        "rules": [{"action": "Ignore", **DISRUPTED}, {"action": "FailJob", **MISTAKEN}]
    },
}
"""A Job that starts each pod again by itself, after 10 s and then twice as long each time."""
_POLICY = {"onJobFailureReasons": ["PodFailurePolicy"]}
_MISTAKE = {"onJobFailureMessagePatterns": [f"exit code {EXIT_MISTAKE} matching"]}
RESTARTS = {
    "maxRestarts": MAX_RESTARTS,
    # New ranks would find engines of the last start, which may take a minute to end.
    "restartStrategy": "BlockingRecreate",
    "rules": [
        {"name": "mistake", "action": "FailJobSet", **_POLICY, **_MISTAKE},
        {"name": "saved_or_moved", "action": "RestartJobSetAndIgnoreMaxRestarts", **_POLICY},
    ],
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of one kind, and the properties that all pods there have."""

    name: str
    """Name of the JobSet, and of its headless service."""
    num_nodes: int
    gpus_per_node: int
    image: str
    volumes: Sequence[tuple[str, str]]
    """(persistent volume claim, path) of each; the first path is the working directory."""
    resources: Mapping[str, str]
    """Further resources of a whole node's pod, such as RDMA devices and memory."""
    queue: str | None
    """A queue of Kueue."""

    def run(self, cfg: Config, arguments: Sequence[str]) -> str:
        """YAML of a run by `train ARGUMENTS`. Engines on nodes without ranks are Jobs of their own;
        `train` starts others. ValueError as `place` raises it."""
        placed = place(cfg, self._nodes, self.gpus_per_node)
        trainers = placed.trainer_nodes
        if not placed.engines or any({*each.nodes} & {*trainers} for each in placed.engines):
            return self._manifest(self._ranks(arguments, self.num_nodes))
        ranks = self._ranks([*arguments, self._base_urls(placed)], len(trainers))
        return self._manifest(ranks, self._engines(placed, arguments))

    def joined(self, cfg: Config, overrides: Sequence[str]) -> str:
        """YAML of engines that join the run in `train.run_dir`, as many as fit."""
        placed = place_engines(cfg, self._nodes, self.gpus_per_node)
        arguments = [str(cfg.train.run_dir / "config.yaml"), *overrides, "--join"]
        return self._manifest(self._engines(placed, arguments, joins=True))

    @property
    def _nodes(self) -> list[str]:
        return [str(number) for number in range(self.num_nodes)]

    def _ranks(self, arguments: Sequence[str], num_nodes: int) -> Object:
        command = ["megatron-grpo", "train", *arguments]
        command += [f"--nnodes={num_nodes}", "--node-rank=$(JOB_COMPLETION_INDEX)"]
        command += [f"--master-addr={self._host('ranks', 0, 0)}"]
        command += ["--local-addr=$(POD_IP)", f"--gpus-per-node={self.gpus_per_node}"]
        pod = self._pod("ranks", command, self.gpus_per_node, SAVE_SECONDS, env=[POD_IP])
        return self._job("ranks", pod, num_nodes, **TOGETHER)

    def _engines(self, placed: Placement, arguments: Sequence[str], joins: bool = False) -> Object:
        """Jobs that run `serve ARGUMENTS`: one for all engines, or for each of several nodes."""
        span, num_gpus = len(placed.engines[0].nodes), len(placed.engines[0].gpus)
        num_engines = len(placed.engines)
        command = [*(() if joins else KEPT), "megatron-grpo", "serve", *arguments]
        command += ["--host=$(POD_IP)", f"--port={PORT}"]
        grace = SAVE_SECONDS if joins else END_SECONDS
        container: Object = {"ports": [{"name": "http", "containerPort": PORT}], "env": [POD_IP]}
        if span == 1:
            pod = self._pod("engines", command, num_gpus, grace, **container)
            return self._job("engines", pod, num_engines, **ALONE)
        container["env"] += [JOB_INDEX, {"name": NODES_VARIABLE, "value": str(span)}]
        command += [f"--nnodes={span}", "--node-rank=$(JOB_COMPLETION_INDEX)"]
        command += [f"--master-addr={self._host('engines', '$(JOB_INDEX)', 0)}"]
        pod = self._pod("engines", command, num_gpus, grace, **container)
        # An engine that leaves a run ends on its first node.
        ends = {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}
        return self._job("engines", pod, span, num_engines, **ends, **TOGETHER)

    def _base_urls(self, placed: Placement) -> str:
        """Addresses of `_engines`, whose pods keep their names when they move."""
        has_jobs, numbers = len(placed.engines[0].nodes) > 1, range(len(placed.engines))
        places = [(number, 0) if has_jobs else (0, number) for number in numbers]
        urls = [f"http://{self._host('engines', *place)}:{PORT}" for place in places]
        return f"rollout.base_urls=[{','.join(urls)}]"

    def _manifest(self, *jobs: Object) -> str:
        """YAML of the JobSet, which is complete when the first of `jobs` is."""
        labels = {"labels": {"kueue.x-k8s.io/queue-name": self.queue}} if self.queue else {}
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [jobs[0]["name"]]},
            "failurePolicy": RESTARTS,
            "replicatedJobs": jobs,
        }
        jobset = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name, **labels},
            "spec": spec,
        }
        # By JSON: YAML would refer to parts that occur twice.
        return HEAD + yaml.safe_dump(json.loads(json.dumps(jobset)), sort_keys=False, width=inf)

    def _host(self, job: str, job_index: int | str, pod_index: int) -> str:
        return f"{self.name}-{job}-{job_index}-{pod_index}.{self.name}"

    def _job(self, name: str, pod: Object, num_pods: int, replicas: int = 1, **ends: Any) -> Object:
        longest = f"{self.name}-{name}-{replicas - 1}-{num_pods - 1}-abcde"
        if len(longest) > 63 or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", self.name):
            raise ValueError(
                f"--name {self.name!r}: use small letters, digits and hyphens, a letter first, and "
                f"so few that names of pods, such as {longest}, have 63 characters at most"
            )
        spec = {"completions": num_pods, "parallelism": num_pods, "completionMode": "Indexed"}
        template = {"spec": spec | ends | {"template": {"spec": pod}}}
        return {"name": name, "replicas": replicas, "template": template}

    def _resources(self, num_gpus: int) -> Object:
        """Limits and requests of a pod; ValueError if its part of `resources` is not whole."""
        limits: Object = {"nvidia.com/gpu": num_gpus, **self.resources}
        if num_gpus < self.gpus_per_node:
            for key, value in self.resources.items():
                amount = re.fullmatch(r"(\d+)(\D*)", value)
                if not amount or int(amount[1]) * num_gpus % self.gpus_per_node:
                    divisor = self.gpus_per_node // gcd(num_gpus, self.gpus_per_node)
                    raise ValueError(
                        f"--resource {key}={value} is for a whole node, and engines have "
                        f"{num_gpus} of its {self.gpus_per_node} GPUs: take a multiple of {divisor}"
                    )
                limits[key] = f"{int(amount[1]) * num_gpus // self.gpus_per_node}{amount[2]}"
        # A limit of cpu would make threads wait on a node that is idle.
        cpu = {"requests": {"cpu": limits.pop("cpu")}} if "cpu" in limits else {}
        return {"limits": limits, **cpu}

    def _pod(
        self, name: str, command: Sequence[str], num_gpus: int, grace: int, **container: Any
    ) -> Object:
        values = {
            # The package comes from the image, not from a checkout in the working directory.
            "PYTHONSAFEPATH": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "HF_HOME": f"{self.volumes[0][1]}/.cache/huggingface",
        }
        env = container.pop("env", []) + [{"name": k, "value": v} for k, v in values.items()]
        volumes: list[Object] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
        for number, (claim, path) in enumerate(self.volumes):
            source = {"persistentVolumeClaim": {"claimName": claim}}
            volumes.append({"name": f"volume-{number}", **source})
            mounts.append({"name": f"volume-{number}", "mountPath": path})
        # RDMA devices pin memory. Namespaces with the standard "baseline" forbid this capability.
        has_devices = any("/" in key for key in self.resources)
        pins = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace,
            # Process 1 is not ours: it would not see a signal without a handler, and reap orphans.
            "shareProcessNamespace": True,
            # Code of rewards and agents runs here.
            "automountServiceAccountToken": False,
            # A service with the name vllm would set vLLM's variable VLLM_PORT.
            "enableServiceLinks": False,
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "containers": [
                {
                    "name": name,
                    "image": self.image,
                    "command": [*command],
                    "workingDir": self.volumes[0][1],
                    "env": env,
                    "envFrom": [{"secretRef": {"name": SECRET}}],
                    **container,
                    "resources": self._resources(num_gpus),
                    **(pins if has_devices else {}),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        }
