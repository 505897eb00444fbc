"""Users' Python files, which a config names as `file.py:name`, and the texts of their failures."""

import hashlib
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_grpo.launch.process import describe_exit


def load_user_file(file: Path, kind: str) -> ModuleType:
    """Import `file` as a module; ValueError, which names its `kind`, unless it is a Python file."""
    if not file.is_file():
        raise ValueError(f"{kind} {file} does not exist")
    sys.path.insert(0, str(file.parent))  # so that it can import modules next to it
    # A name of its own, without dots: a user's json.py replaces neither the standard json nor
    # another of the user's.
    digest = hashlib.sha256(bytes(file.resolve())).hexdigest()
    spec = spec_from_file_location(f"user_file_{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{kind} {file} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up their module
    spec.loader.exec_module(module)
    return module


def load_named(name: str, kind: str) -> Callable[..., Any]:
    """Import the function or class `file.py:name`; ValueError if the file has none."""
    path, _, attribute = name.rpartition(":")
    found = getattr(load_user_file(Path(path), kind), attribute, None)
    if not callable(found):
        raise ValueError(f"{path} has no function or class {attribute!r}")
    return found


def load_function(name: str, kind: str) -> Callable[..., Any]:
    """`load_named` for functions of the trainer's own process: ValueError, with file and line,
    also if the file cannot be imported."""
    try:
        return load_named(name, kind)
    except Exception as error:
        if is_refusal(error):
            raise
        text = error_text(error, "the host")
        raise ValueError(f"{kind} {name} cannot be imported: {text}") from None


MAX_TEXT = 4000
"""Last characters of an error that are kept: the end of a traceback says what happened."""


PACKAGE = Path(__file__).parents[1]
CALLERS = (
    "worker.py",
    "fork_server.py",
    "functions.py",
    "advantage_function.py",
    "loss_function.py",
    "hooks.py",
    "user_file.py",
    "supervised.py",
    "actors.py",
    "tools.py",
)
"""Files of this package that import or call user code."""
EVENT_LOOP = Path(traceback.__file__).parent / "asyncio"


def is_refusal(error: BaseException) -> bool:
    """Whether this package raised the ValueError: its message is enough. An error of user code,
    such as a JSONDecodeError, needs its type, file and line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) and _is_ours(frames[-1].f_code.co_filename)


def error_text(error: BaseException, limit: str) -> str:
    """The text of an exception of user code, with the traceback from its first frame on."""
    if isinstance(error, MemoryError):
        return f"more memory than {limit} allows"
    trace = error.__traceback__
    while trace is not None and _is_caller_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    if len(text) > MAX_TEXT:  # earlier errors of the chain would push out the user's lines
        text = "".join(traceback.format_exception(type(error), error, trace, chain=False)).rstrip()
    return text[-MAX_TEXT:]


def _is_caller_frame(file: str) -> bool:
    is_caller = _is_ours(file) and Path(file).name in CALLERS
    is_loop = Path(file).is_relative_to(EVENT_LOOP)
    return is_caller or is_loop or file.startswith("<frozen importlib")


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(PACKAGE)


def death_text(code: int | None, limit: str) -> str:
    """Text for a process that stopped answering; `code` as in `subprocess`, None if alive."""
    if code is None:
        return "its process has closed the connection to the trainer"
    died = f"its process died with {describe_exit(code)}"
    return f"{died} (its limit was {limit})" if code < 0 else died


def finite_number(value: Any) -> float | None:
    """A value of user code as a float; None unless it is a finite number."""
    try:
        return float(value) if not isinstance(value, str) and math.isfinite(value) else None
    except (TypeError, ValueError, OverflowError):  # an integer beyond every float
        return None


def required_parameters(parameters: Mapping[str, Parameter]) -> list[str]:
    """Names of the parameters without a default, `*args` and `**columns` excluded."""
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def accepted_columns(parameters: Mapping[str, Parameter]) -> list[str] | None:
    """Names of the columns that these parameters accept; None for all, with `**columns`. `**_`
    accepts none: its name says that nothing reads it."""
    catch_all = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    if catch_all and catch_all != ["_"]:
        return None
    return [name for name in parameters if name not in catch_all]


def select_accepted(
    given: Mapping[str, Any], parameters: Mapping[str, Parameter]
) -> dict[str, Any]:
    names = accepted_columns(parameters)
    return {name: value for name, value in given.items() if names is None or name in names}


def missing_column(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Count the rows without column `name`, and name the columns of the first; empty if none."""
    lacking = [row for row in rows if name not in row]
    if not lacking:
        return ""
    return (
        f"{len(lacking)} of {len(rows)} rows have no such column; the first of them has "
        f"{', '.join(lacking[0])}"
    )
