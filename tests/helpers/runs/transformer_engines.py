"""A fake Transformer Engine package on disk, for processes on machines without the real one."""

from pathlib import Path

PACKAGE = """
__version__ = "2.20.2"
try:
    from . import pytorch
except ImportError:  # as the real one, which is also for JAX
    pass
"""


def write_transformer_engine(folder: Path, pytorch: str) -> None:
    """Write the package to `folder`; `pytorch` is the code of its torch module."""
    package = folder / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    (package / "pytorch" / "__init__.py").write_text(pytorch, encoding="utf-8")
