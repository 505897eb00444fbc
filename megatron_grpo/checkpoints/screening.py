"""Checks the pickles of a checkpoint before anything loads them.

Loading a pickle calls whatever it names. A run itself loads none without restriction, but torch and
Megatron-Core so load the index of a checkpoint and the objects in its files, and a checkpoint that
would harm them is not good.
"""

import os
from pathlib import Path

from checkpoint_convert.formats.torch_dist_metadata import read_object_places
from checkpoint_convert.formats.torch_file import screen


def screen_checkpoint(folder: Path) -> None:
    """Raise ValueError when loading `folder` would call more than loading tensors requires."""
    common = folder / "common.pt"
    _screen(common, 0, common.stat().st_size)
    for file, offset, length in sorted(set(read_object_places(folder / ".metadata"))):
        _screen(folder / file, offset, length)


def _screen(path: Path, offset: int, length: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        screen(descriptor, path, offset, length)
    finally:
        os.close(descriptor)
