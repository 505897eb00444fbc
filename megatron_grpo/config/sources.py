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
    """Scoring: the keys of `reward`, whose values are the defaults; null: the same as `reward`."""
    environment: EnvironmentConfig | None = None
    """The keys of `environment`, whose values are the defaults; null: the same as `environment`."""
    agent: AgentConfig | None = None
    """The keys of `agent`, whose values are the defaults; null: the same as `agent`."""

    @property
    def own(self) -> dict[str, Section]:
        """The sections in which it differs from the run, by name."""
        return {name: section for name, section in self if section is not None}


OWN_SECTIONS = tuple(Source.model_fields)


class SourcesConfig(Section):
    """Several kinds of rows in one run, each with rewards, and an environment or an agent."""

    column: str | None = None
    """Column of the data that says which of `by_name` a row is of, such as `data_source`."""
    by_name: dict[str, Source] = Field(default={})
    """By the value in that column, the sections `reward`, `environment` and `agent` of such rows,
    as far as they differ from the run's. Metrics are then also `source/NAME/*`."""

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
        """The source of a row that has the column."""
        return ALONE if self.column is None else str(row[self.column])

    def scored_by(self, reward: RewardConfig | None) -> "SourcesConfig":
        """Give all sources one `reward`, if there is one."""
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
    """The table of a run, with the sections of each of its sources completed from its own."""
    table = run.get("sources")
    named = table.get("by_name") if isinstance(table, dict) else None
    if not (isinstance(table, dict) and isinstance(named, dict)):
        return run
    by_name = {
        str(name): completed(source, OWN_SECTIONS, run) if isinstance(source, dict) else source
        for name, source in named.items()
    }
    return {**run, "sources": {**table, "by_name": by_name}}
