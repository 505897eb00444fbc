"""Reads from config.json which layers have a window of attention, and of how many tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.config_values import boolean, integer
from checkpoint_convert.families.description import Family, Windows

WINDOWED, FULL = "sliding_attention", "full_attention"
"""What `layer_types` has for a layer with a window, and for one without."""


def read_windows(
    path: Path, config: Mapping[str, Any], family: Family
) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the indices of the layers that have it; None if no layer has one.

    `config` holds the values of the file at `path`. Raises ValueError for values that make no
    sense, or that transformers and vLLM would read differently.
    """
    windows = family.windows
    if windows is None:  # then `layer_types` is refused with the settings that all families lack
        return None, ()
    num_layers = integer(path, config, "num_hidden_layers")
    is_on = windows.switch is None or (
        config.get(windows.switch) and boolean(path, config, windows.switch)
    )
    window = None
    if is_on and config.get("sliding_window") is not None:
        window = integer(path, config, "sliding_window")
    if window is None and windows.rope_theta is not None and not config.get("layer_types"):
        raise ValueError(
            f"{path}: sliding_window is {config.get('sliding_window')!r}; transformers reads that "
            f"only where layer_types says {FULL} of every layer"
        )
    own = _by_rule(path, config, windows, num_layers) if window else [FULL] * num_layers
    given = config.get("layer_types") or own
    possible = [FULL, WINDOWED] if window else [FULL]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ValueError(
            f"{path}: layer_types is {given!r}; it must list {possible}, one for each of "
            f"num_hidden_layers({num_layers})"
        )
    if others := sorted({str(kind) for kind in given} - {*possible}):
        off = [key for key in ("sliding_window", windows.switch) if key]
        why = "" if window else f" with {', '.join(f'{key} {config.get(key)!r}' for key in off)}"
        raise ValueError(
            f"{path}: layer_types contains {others}, only {possible}{why} is supported"
        )
    if given != own and not windows.are_by_layer_types:
        raise ValueError(f"{path}: layer_types is {given}, only {own} is supported")
    layers = tuple(layer for layer, kind in enumerate(given) if kind == WINDOWED)
    return (window, layers) if layers else (None, ())


def _by_rule(path: Path, config: Mapping[str, Any], windows: Windows, num_layers: int) -> list[str]:
    """The kind of each layer where `layer_types` does not say it."""
    first, every = 0, 0
    if windows.first is not None:
        first = integer(path, config, windows.first, minimum=0)
    if windows.every is not None:
        every = (
            integer(path, config, windows.every)
            if isinstance(windows.every, str)
            else windows.every
        )
    return [
        FULL if layer < first or (every and (layer + 1) % every == 0) else WINDOWED
        for layer in range(num_layers)
    ]
