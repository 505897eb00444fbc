"""Several tasks in one run: the keys of `sources`."""

import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from megatron_grpo.config.agent import AgentConfig
from megatron_grpo.config.reward import EnvironmentConfig, RewardConfig
from megatron_grpo.config.section import Section, completed

SOURCE_NAME = re.compile(r"[\w./-]+", re.ASCII)
ALONE = ""
"""Name of the only source of a run that names none."""


class Source(Section):
    """How rows of one kind are answered and scored."""

    reward: RewardConfig | None = None
    """Scoring: the keys of `reward`, which also gives their defaults; null: `reward` itself."""
    environment: EnvironmentConfig | None = None
    """The keys of `environment`, which also gives their defaults; null: `environment` itself."""
    agent: AgentConfig | None = None
    """The keys of `agent`, which also gives their defaults; null: `agent` itself."""

    @property
    def own(self) -> dict[str, Section]:
        """Sections of the source that replace the run's, by name."""
        return {name: section for name, section in self if section is not None}


OWN_SECTIONS = tuple(Source.model_fields)


class SourcesConfig(Section):
    """Several kinds of rows in one run, each with rewards, and an environment or an agent."""

    column: str | None = None
    """Column with the name of a row's source, such as `data_source`; null: no sources."""
    by_name: dict[str, Source] = Field(default={})
    """Sections `reward`, `environment` and `agent` of each source by its name, with the run's
    values as defaults. Metrics are also `source/NAME/*`."""

    @field_validator("by_name", mode="after")
    @classmethod
    def _names_are_parts_of_metrics(cls, value: dict[str, Source]) -> dict[str, Source]:
        for name in value:
            if not SOURCE_NAME.fullmatch(name):
                raise ValueError(
                    f"sources.by_name has the name {name!r}, which becomes part of metrics: use "
                    "letters, digits and ./-_, such as gsm8k"
                )
        return value

    @model_validator(mode="after")
    def _column_has_names(self) -> Self:
        if bool(self.by_name) != (self.column is not None):
            raise ValueError(
                f"sources.column {self.column or 'null'} and sources.by_name "
                f"({', '.join(self.by_name)}) need each other: name the column, and what its "
                "values mean"
            )
        return self

    def of(self, row: Mapping[str, Any]) -> str:
        """Source of a row; the row must have the column."""
        return ALONE if self.column is None else str(row[self.column])

    def scored_by(self, reward: RewardConfig | None) -> "SourcesConfig":
        """Replace the reward of every source by `reward`, unless that is None."""
        if reward is None:
            return self
        return self.model_copy(
            update={
                "by_name": {
                    name: source.model_copy(update={"reward": reward})
                    for name, source in self.by_name.items()
                }
            }
        )


def with_sources(run: dict[str, Any]) -> dict[str, Any]:
    """Complete the sections of each source in the table of a run from the run's own."""
    table = run.get("sources")
    named = table.get("by_name") if isinstance(table, dict) else None
    if not (isinstance(table, dict) and isinstance(named, dict)):
        return run
    by_name = {
        str(name): completed(source, OWN_SECTIONS, run) if isinstance(source, dict) else source
        for name, source in named.items()
    }
    return {**run, "sources": {**table, "by_name": by_name}}
