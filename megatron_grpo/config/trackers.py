"""Trackers besides the run directory and TensorBoard: wandb, trackio, SwanLab."""

from pydantic import Field, NonNegativeInt

from megatron_grpo.config.section import Section


class WandbConfig(Section):
    """Logging to Weights & Biases: offline without WANDB_API_KEY, unless WANDB_MODE is set."""

    project: str | None = None
    """Project to log to; null: no logging to wandb."""
    name: str | None = None
    """Name of the run; null: wandb chooses one."""
    entity: str | None = None
    """Team or user that owns the project; null: the default of the API key."""
    group: str | None = None
    """Group of the run, such as its sweep."""
    tags: tuple[str, ...] = Field(default=(), strict=False)
    """Labels of the run."""
    num_completions: NonNegativeInt = 16
    """Maximum completions per step in wandb's table; `completions.jsonl` has all."""


class TrackioConfig(Section):
    """Logging with trackio: to its folder on this host, unless its environment variables name a
    server."""

    project: str | None = None
    """Project to log to; null: no logging with trackio (`pip install trackio`)."""
    name: str | None = None
    """Name of the run, by which a resumed job continues it; null: the name of the run directory."""
    num_completions: NonNegativeInt = 16
    """Maximum completions per step in trackio's table; `completions.jsonl` has all."""


class SwanlabConfig(Section):
    """Logging to SwanLab: offline without SWANLAB_API_KEY, unless SWANLAB_MODE is set."""

    project: str | None = None
    """Project to log to; null: no logging to SwanLab (`pip install swanlab`)."""
    name: str | None = None
    """Name of the run; null: SwanLab chooses one."""
    workspace: str | None = None
    """User or organization that owns the project; null: the owner of the API key."""
    num_completions: NonNegativeInt = 16
    """Maximum completions per step in SwanLab's table; `completions.jsonl` has all."""
