"""Configs of published models (tests/published/), for plans and shapes without weights.

Each file has the model's config.json as `config` and, where a test counts them, the number of
parameters in its weight files as `num_parameters`.
"""

import json
from pathlib import Path
from typing import Any

_FILES = sorted(Path(__file__).parents[2].glob("published/*.json"), key=lambda x: x.stem.lower())
_MODELS = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in _FILES}
PUBLISHED_MODELS: dict[str, dict[str, Any]] = {name: x["config"] for name, x in _MODELS.items()}
"""config.json of each, by name."""
NUM_PARAMETERS: dict[str, int] = {
    name: each["num_parameters"] for name, each in _MODELS.items() if "num_parameters" in each
}


def write_config(folder: Path, name: str, **differing: Any) -> Path:
    """Create `folder` with the config.json of a published model, its keys overridden by
    `differing`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(PUBLISHED_MODELS[name] | differing), encoding="utf-8"
    )
    return folder
