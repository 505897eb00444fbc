"""Python files of the user's that a config names, as `file.py:name`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_user_file(file: Path, kind: str) -> ModuleType:
    """Run `file` as a module; ValueError, which says what `kind` of file it is, if that is none."""
    if not file.is_file():
        raise ValueError(f"{kind} {file} does not exist")
    sys.path.insert(0, str(file.parent))  # so that it may import its neighbours
    # A name of our own: a file called json.py must not become everybody's json.
    spec = spec_from_file_location(f"user_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{kind} {file} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
