"""The Python that `make setup` takes, from real interpreters in folders of a test."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "requirements" / "make_venv.sh"
RUNNING = platform.python_version()


def interpreters() -> dict[str, Path]:
    """Available interpreters by version: this one, and pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {path.name: path / "bin" / "python3" for path in pyenv.glob("3.*")}
    return {**found, RUNNING: Path(sys.executable).resolve()}


@pytest.fixture
def machine(tmp_path: Path) -> "Machine":
    return Machine(tmp_path)


class Machine:
    """A machine with the test's folders as PATH and home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path: list[Path] = []

    def add(self, place: str, python: Path, on_path: bool = True) -> Path:
        """Put a link to `python` at `place`, and its folder next on PATH."""
        link = self.folder / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(python)
        if on_path:
            self.path.append(link.parent)
        return link

    def shim(self) -> Path:
        """The shim of a version manager for a version that is not selected."""
        shim = self.folder / "shim"
        shim.write_text("#!/bin/sh\necho manager: python3.13: command not found >&2\nexit 127\n")
        shim.chmod(0o755)
        return shim

    def make_venv(self, *python: str) -> subprocess.CompletedProcess[str]:
        path = ":".join(map(str, self.path))
        return subprocess.run(
            [SCRIPT, ".venv", *python],
            cwd=self.folder,
            env={"PATH": path, "HOME": str(self.folder)},
            capture_output=True,
            text=True,
        )

    @property
    def venv_version(self) -> str:
        config = (self.folder / ".venv" / "pyvenv.cfg").read_text()
        return config.split("version = ")[1].split("\n")[0]


@pytest.mark.long
def test_a_python_on_path_is_taken_behind_a_shim_that_only_prints_an_error(machine):
    machine.add("shims/python3.13", machine.shim())
    first = machine.add("one/python3", interpreters()[RUNNING])
    machine.add("two/python3", interpreters()[RUNNING])
    made = machine.make_venv()
    assert made.returncode == 0, made.stderr
    assert f"Python {RUNNING}, the newest that works: {first}\n" in made.stdout
    assert machine.venv_version == RUNNING


@pytest.mark.long
@pytest.mark.parametrize(
    "place", [".pyenv/versions/a/bin/python3", ".local/share/uv/python/a/bin/python3"]
)
def test_a_newer_python_of_pyenv_or_uv_is_taken_before_one_on_path(machine, place):
    known = interpreters()
    works = sorted(v for v in known if v.startswith(("3.12.", "3.13.")))
    if len(works) < 2:
        pytest.skip("there is one Python here that works")
    machine.add("bin/python3", known[works[0]])
    newest = machine.add(place, known[works[-1]], on_path=False)
    made = machine.make_venv()
    assert f"Python {works[-1]}, the newest that works: {newest}\n" in made.stdout


@pytest.mark.long
def test_a_minor_version_can_be_named(machine):
    older = next((v for v in interpreters() if v.startswith("3.12.")), RUNNING)
    minor = older.rpartition(".")[0]
    place = machine.add(f"bin/python{minor}", interpreters()[older])
    machine.add("bin/python3", interpreters()[RUNNING])
    assert (
        f"Python {older}, the newest {minor} that works: {place}\n"
        in machine.make_venv(minor).stdout
    )
    for missing in {"3.12", "3.13"} - {minor, RUNNING.rpartition(".")[0]}:
        assert f"found no Python {missing} that works" in machine.make_venv(missing).stderr


def test_a_machine_without_a_working_python_shows_the_tried_ones_and_advice(machine):
    shim = machine.add("shims/python3.13", machine.shim())
    tried = f"  {shim}: manager: python3.13: command not found\n"
    if old := next((v for v in interpreters() if v.startswith(("3.9.", "3.10.", "3.11."))), None):
        tried += f"  {machine.add('bin/python', interpreters()[old])}: Python {old}\n"
    refused = machine.make_venv()
    assert refused.returncode == 1
    assert "Get one by `uv python install 3.13`, `pyenv install 3.13` or" in refused.stderr
    assert refused.stderr.endswith("Looked at:\n" + tried)
    assert "PYTHON=3.11 is neither 3.12 nor 3.13" in machine.make_venv("3.11").stderr


@pytest.mark.long
def test_a_venv_keeps_its_python_and_refuses_another_one(machine):
    python = str(machine.add("bin/python3", interpreters()[RUNNING]))
    assert f"Python {RUNNING}, named by PYTHON" in machine.make_venv(python).stdout
    assert machine.make_venv(python).returncode == 0
    kept = machine.make_venv()
    assert kept.returncode == 0 and f".venv keeps Python {RUNNING};" in kept.stdout
    missing = machine.make_venv("python3.13")
    assert missing.returncode == 1 and "PYTHON=python3.13 does not work" in missing.stderr
    other = next((v for v in interpreters() if v[:5] in {"3.12.", "3.13."} - {RUNNING[:5]}), None)
    if other is None:
        pytest.skip("there is one Python here that works")
    refused = machine.make_venv(str(interpreters()[other]))
    assert refused.returncode == 1 and f".venv has Python {RUNNING}, but" in refused.stderr
    assert machine.venv_version == RUNNING


def test_a_folder_without_an_environment_is_left_alone(machine):
    machine.add("bin/python3", interpreters()[RUNNING])
    kept = machine.folder / ".venv" / "precious"
    kept.mkdir(parents=True)
    refused = machine.make_venv()
    assert refused.returncode == 1 and ".venv is not empty, and no environment" in refused.stderr
    assert kept.exists()
