"""The command that shows where a job's ranks and engines run; `cli` registers it."""

from collections.abc import Sequence
from typing import Annotated

import typer

from megatron_grpo.command_arguments import ConfigFile, Overrides
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.kubernetes import Cluster
from megatron_grpo.launch.launch import check_files
from megatron_grpo.launch.placement import place as place_run
from megatron_grpo.launch.placement import place_engines

Nodes = Annotated[
    str, typer.Option(help="Node names of the job, separated by commas; in Kubernetes, how many.")
]
GpusPerNode = Annotated[
    int, typer.Option(min=1, help="GPUs per node; without GPUs, ranks per node.")
]
OnlyEngines = Annotated[
    bool, typer.Option("--only-engines", help="As many engines as fit: see slurm/engines.sh.")
]
Kubernetes = Annotated[
    bool,
    typer.Option("--kubernetes", help="Print a JobSet, for `kubectl apply -f -`."),
]
Image = Annotated[str | None, typer.Option(help="Image of all pods: see slurm/Dockerfile.")]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the JobSet. Default: CONFIG's; of engines, CONFIG-joined."),
]
Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        metavar="CLAIM:PATH",
        help="Persistent volume claim, and where pods see it; they start in the first one.",
    ),
]
Resources = Annotated[
    list[str] | None,
    typer.Option(
        "--resource",
        metavar="KEY=VALUE",
        help="What the pod of a whole node gets, such as rdma/ib=1; smaller pods get their part.",
    ),
]
Queue = Annotated[str | None, typer.Option(help="Queue of Kueue.")]
Gpu = Annotated[str, typer.Option(help="GPU model, as for `plan`.")]


def place(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Nodes = "localhost",
    gpus_per_node: GpusPerNode = 8,
    only_engines: OnlyEngines = False,
    kubernetes: Kubernetes = False,
    image: Image = None,
    name: Name = None,
    volume: Volumes = None,
    resource: Resources = None,
    queue: Queue = None,
    gpu: Gpu = "h100",
) -> None:
    """Show which node of a job runs which ranks and engines.

    Prints one line for each, in the format that the job scripts read. Then it looks for the files
    that CONFIG names, as rank 0 runs on the first node; the exit code is 2 if one is missing.

    --kubernetes prints a manifest (docs/kubernetes.md). It looks for no files, which are on the
    cluster's volumes, but plans first, which needs config.json in model.path; exit code 2: CONFIG
    does not fit.

    \b
    Examples:
      megatron-grpo place configs/grpo_8b.yaml --nodes node1 --gpus-per-node 8
      megatron-grpo place configs/grpo_70b.yaml --kubernetes --nodes 8 \\
          --image IMAGE --volume shared:/shared | kubectl apply -f -
    """
    cfg = load_config(config, overrides or [])
    if kubernetes:
        if not (image and volume and nodes.isdecimal() and int(nodes)):
            raise typer.BadParameter("--kubernetes needs --image, --volume and --nodes NUMBER")
        stem = config.stem.lower().replace("_", "-")
        cluster = Cluster(
            name=name or (f"{stem}-joined" if only_engines else stem),
            num_nodes=int(nodes),
            gpus_per_node=gpus_per_node,
            image=image,
            volumes=_pairs(volume, ":"),
            resources=dict(_pairs(resource or [], "=")),
            queue=queue,
        )
        if only_engines:
            print(cluster.joined(cfg, overrides or []), end="")
        else:
            print(_planned(cfg, cluster, gpu, [str(config), *(overrides or [])]), end="")
        return
    hosts = nodes.split(",")
    place_all = place_engines if only_engines else place_run
    placed = place_all(cfg, hosts, gpus_per_node)
    print(f"run_dir {cfg.train.run_dir}")
    print(placed)
    if not only_engines:
        check_files(cfg)


def _planned(cfg: Config, cluster: Cluster, gpu: str, arguments: Sequence[str]) -> str:
    from megatron_grpo.planning.command import plan_config  # half a second

    manifest = cluster.run(cfg, arguments)
    cfg.model.check_folder(only_config=True)
    plan_config(cfg, gpu, cluster.num_nodes * cluster.gpus_per_node, None).check()
    return manifest


def _pairs(options: Sequence[str], separator: str) -> list[tuple[str, str]]:
    parts = [each.partition(separator) for each in options]
    if wrong := [option for option, each in zip(options, parts, strict=True) if not all(each)]:
        raise typer.BadParameter(f"{wrong[0]!r} is not in the form NAME{separator}VALUE")
    return [(first, second) for first, _, second in parts]
