"""User's Python files, which a config names as `file.py:name`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_user_file(file: Path, kind: str) -> ModuleType:
    """Import `file` as a module; raises ValueError, naming the `kind` of file, if it cannot be."""
    if not file.is_file():
        raise ValueError(f"{kind} {file} does not exist")
    sys.path.insert(0, str(file.parent))  # so that it can import modules next to it
    # A distinct module name: a user's json.py must not replace the standard json for everyone.
    spec = spec_from_file_location(f"user_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{kind} {file} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up their module
    spec.loader.exec_module(module)
    return module
