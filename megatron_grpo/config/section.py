"""Base class of every table of the config."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the config: frozen, of known keys and exact types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
