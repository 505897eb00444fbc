"""Weight file formats: safetensors, torch.save, torch_dist; accessed box by box, in place.

Only the modules `torch_*` need torch.
"""

from pathlib import Path

METADATA_FILE = ".metadata"


def is_torch_dist(folder: Path) -> bool:
    """Whether `folder` is a torch_dist checkpoint, complete or not."""
    return (folder / METADATA_FILE).is_file() or next(folder.glob("*.distcp"), None) is not None
