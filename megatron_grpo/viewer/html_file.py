"""Files of the page, and a single HTML file with page and runs, which needs no network."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.reporting.rows import NO_LIMIT, newest_rows, rows_of
from megatron_grpo.reporting.tracking import (
    COMPLETIONS_FILE,
    EVAL_COMPLETIONS_FILE,
    METRICS_FILE,
    TOKENS_FILE,
)
from megatron_grpo.viewer.run import RunFiles, array

PAGE = Path(__file__).parent / "page"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
}
BYTES = 8_000_000
"""Limit for each of completions, evaluated completions and tokens, over all runs."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""Content Security Policy: the browser loads nothing else, whatever the runs contain."""


def plotly_file() -> Path:
    """Path of plotly.js in the package `plotly`, which is not imported; raises ValueError if it is
    not installed."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ValueError("the curves need plotly: pip install 'megatron-grpo[view]'")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def write_html(runs: dict[str, RunFiles], path: Path) -> None:
    """Write the page of `runs`, by name, to one file: all metrics, configs and timelines, and
    completions and tokens of the newest steps within `BYTES`, at least of one step."""
    parts = [_embedded(name, run, BYTES // len(runs)) for name, run in runs.items()]
    # In JSON, `<` occurs in strings only. Escaped, no model's text can end the script element.
    data = array(parts).replace(b"<", rb"\u003c").decode()
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    page = re.sub(r'<link rel="stylesheet" href="([\w.]+)">', _style, page)
    page = re.sub(r'<script src="([\w.]+)"></script>', _script, page)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    embedded = f'<script type="application/json" id="embedded">{data}</script>'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}', 1)
    write_whole(path, page.replace("<body>", f"<body>\n{embedded}", 1))


def _embedded(name: str, run: RunFiles, num_bytes: int) -> bytes:
    folder = run.run_dir
    parts = {
        "name": json.dumps(name).encode(),
        "config": run.config(),
        "records": array(rows_of(folder / METRICS_FILE, 0, NO_LIMIT)),
        "completions": array(newest_rows(folder / COMPLETIONS_FILE, num_bytes)),
        "eval_completions": array(newest_rows(folder / EVAL_COMPLETIONS_FILE, num_bytes)),
        "tokens": array(newest_rows(folder / TOKENS_FILE, num_bytes)),
        "timeline": run.timeline(0, NO_LIMIT),
    }
    return b"{" + b",".join(b'"%s":%s' % (key.encode(), part) for key, part in parts.items()) + b"}"


def _style(link: re.Match[str]) -> str:
    return f"<style>{(PAGE / link[1]).read_text(encoding='utf-8')}</style>"


def _script(element: re.Match[str]) -> str:
    file = plotly_file() if element[1] == plotly_file().name else PAGE / element[1]
    # The HTML parser ends a script at this text, even within a JavaScript string.
    code = file.read_text(encoding="utf-8").replace("</script", r"<\/script")
    return f"<script>{code}</script>"
