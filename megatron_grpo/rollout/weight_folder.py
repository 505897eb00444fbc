"""The hand-over of new weights as a Hugging Face folder, as seen by the engines."""

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

BACKEND = "hf_folder"
"""Name of the hand-over in vLLM's registry of weight-transfer backends."""


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor in the safetensors files of `folder`, one at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file to take weights from")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping: it cannot be iterated)
                yield name, tensors.get_tensor(name)


def check_all_loaded(wanted: set[str], loaded: set[str], folder: Path) -> None:
    """Raise ValueError when a parameter kept its old value because `folder` does not hold it."""
    if missing := sorted(wanted - loaded):
        raise ValueError(f"{folder} has no weights for {', '.join(missing)}")
