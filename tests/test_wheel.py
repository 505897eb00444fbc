"""The built wheel in a fresh environment, with the dependencies of this one."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from helpers.models.published import write_config
from helpers.models.tiny import tiny_model

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron_grpo", "checkpoint_convert", "parallel")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from a copy since setuptools writes into the folder of the sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    subprocess.run(
        [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", built, source],
        check=True,
    )
    (path,) = built.iterdir()
    return path


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """A function: run a command of the fresh environment, outside the sources."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([*PIP, "--python", python, *install], check=True)
    # After the installation: pip would take an editable install among them for an older release.
    (site,) = (folder / "venv").glob("lib/python3.*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(others))
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(command, *arguments):
        words = [python.with_name(command), *arguments]
        return subprocess.run(
            words, cwd=folder, env=environ, check=True, capture_output=True, text=True
        ).stdout

    return run


def test_wheel_is_pure_python_and_has_every_file_of_the_packages(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    files = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name} == files


def test_installed_packages_come_from_the_wheel(run):
    imports = "; ".join(f"import {name}; print({name}.__file__)" for name in PACKAGES)
    for path in run("python", "-c", imports).split():
        assert "/venv/lib/" in path


def test_megatron_grpo_plans_a_shipped_config(run, tmp_path):
    assert "plan" in run("megatron-grpo", "--help")
    model = write_config(tmp_path / "model", "Llama-3.1-8B")
    plan = run("megatron-grpo", "plan", ROOT / "configs/grpo_8b.yaml", f"model.path={model}")
    assert "optimizer step" in plan


def test_checkpoint_convert_imports_and_exports_a_model(run, tmp_path):
    assert "import" in run("checkpoint-convert", "--help")
    model = tiny_model(tmp_path / "model", "llama")
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    run("checkpoint-convert", "import", "--hf", model, "--out", megatron, "--tp", "2")
    run("checkpoint-convert", "export", "--megatron", megatron, "--out", back)
    assert run("checkpoint-convert", "verify", model, back)
