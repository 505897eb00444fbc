"""Weight file formats: safetensors, torch.save, torch_dist; accessed box by box, in place.

Only `tensor_io` and the modules `torch_*` need torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

METADATA_FILE = ".metadata"


def is_torch_dist(folder: Path) -> bool:
    """Whether `folder` is a torch_dist checkpoint, complete or not."""
    return (folder / METADATA_FILE).is_file() or next(folder.glob("*.distcp"), None) is not None


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Add `path` to OSErrors that lack a file name, as those of calls on descriptors do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
