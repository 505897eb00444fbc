"""Prompts: the keys of `data`, and of `eval.data`."""

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from megatron_grpo.config.section import Section

OWN_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Parameters of transformers' `apply_chat_template`, and variables that it sets itself."""


class WeightedPath(Section):
    """One of several sets of prompts that a run mixes."""

    path: str
    """As `data.path` of a single set."""
    weight: int = Field(ge=1, le=1000)
    """A whole number: how many prompts are drawn of this set for those of the others."""


ONE, SEVERAL = KINDS_OF_PATH = ("one", "several")
FILE_SUFFIXES = (".jsonl", ".parquet")
CONVERSION = "docs/data.md has commands that convert other formats"
HUB_NAME = re.compile(r"(?!data/)[\w-][\w.-]*(/[\w.-]+)?")
"""NAME or OWNER/NAME; the shipped configs have their data in `data`."""


class DataConfig(Section):
    """Where prompts come from and how a row becomes a prompt."""

    path: Annotated[
        Annotated[str, Tag(ONE)]
        | Annotated[tuple[WeightedPath, ...], Field(strict=False), Tag(SEVERAL)],
        Discriminator(lambda value: SEVERAL if isinstance(value, list | tuple) else ONE),
    ]
    """A .jsonl or .parquet file, a folder of them, or the name of a Hugging Face data set; or a
    list of such sets, each as `{path: ..., weight: ...}`, that are drawn from in the proportion of
    the weights, which are whole numbers."""
    subset: str | None = None
    """Subset of a Hugging Face data set, such as `main` of openai/gsm8k; null for files."""
    split: str = "train"
    """Split of a Hugging Face data set; in a folder, the files named after it, such as `train-*`
    (all files if none is named after a split)."""
    prompt_column: str = "prompt"
    """Column of the question: a string, or chat messages that do not end with the assistant's."""
    answer_column: str | None = "answer"
    """Column of the reference answer, passed to rewards as `answer`; null: none."""
    image_column: str | None = None
    """Column of a row's images: a path from the folder of `path`, bytes, base64 (`data:image/...`),
    or a list of these; null: none. They come before the user's first text (docs/images.md)."""
    system_prompt: str | None = None
    """System message put before every prompt; requires apply_chat_template."""
    apply_chat_template: bool = True
    """Whether prompts go through the tokenizer's chat template; false: the raw text is sent."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as `enable_thinking: false` for Qwen3."""
    date: str | None = None
    """The time that a chat template writes as today's (`strftime_now`), such as
    `2026-11-29T08:30:00+00:00`; null: that of the run's first start, which its config.yaml then
    has, or null for a template that writes none."""
    max_prompt_length: PositiveInt | None = None
    """Leave out rows with longer prompts (in tokens); null: a prompt that does not fit is an
    error."""
    on_invalid: Literal["error", "skip"] = "error"
    """Rows that cannot be used: `error` lists them and stops, `skip` leaves them out."""
    shuffle: bool = True
    """Whether each epoch has its own random order, derived from train.seed; false: row order."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, and `date` in the place of the clock."""
        if self.date is None:
            return self.chat_template_kwargs
        # Without its offset, as transformers' own `strftime_now` has none.
        start = datetime.fromisoformat(self.date).replace(tzinfo=None)
        return {**self.chat_template_kwargs, "strftime_now": start.strftime}

    @property
    def paths(self) -> tuple[WeightedPath, ...]:
        """All paths, with their weights."""
        if isinstance(self.path, str):
            return (WeightedPath(path=self.path, weight=1),)
        return self.path

    def check_exists(self) -> None:
        """Raise ValueError for a path that is not there and no name of a Hugging Face data set, and
        for a file of another format."""
        for name in (each.path for each in self.paths):
            is_read = name.endswith(FILE_SUFFIXES)
            if (is_read or not HUB_NAME.fullmatch(name)) and not Path(name).exists():
                raise ValueError(f"data.path {name} does not exist")
            if Path(name).is_file() and not is_read:
                raise ValueError(
                    f"data.path {name} is neither {' nor '.join(FILE_SUFFIXES)}: {CONVERSION}"
                )

    @field_validator("date")
    @classmethod
    def _date_is_a_time(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(
                f"data.date {value!r} is no time in ISO 8601: use one such as "
                "2026-11-29T08:30:00+00:00, or 2026-11-29"
            ) from None
        return value

    @model_validator(mode="after")
    def _there_is_a_path(self) -> Self:
        if not self.path:
            raise ValueError("data.path is empty: name a file, a folder or a data set")
        return self

    @model_validator(mode="after")
    def _template_fits(self) -> Self:
        for name in sorted(OWN_TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ValueError(
                f"data.chat_template_kwargs.{name} is reserved: give variables of the chat "
                "template, such as enable_thinking"
            )
        return self
