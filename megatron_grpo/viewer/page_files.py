"""The files of the page: its own, which are read as they are, and plotly.js."""

from importlib.util import find_spec
from pathlib import Path

PAGE = Path(__file__).parent / "page"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
}


def plotly_file() -> Path:
    """plotly.js of the installed package `plotly`, which is not imported; ValueError without it."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ValueError("the curves need plotly: pip install 'megatron-grpo[view]'")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"
