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
    """A file, folder or data set, as in `data.path` of a single set."""
    weight: int = Field(ge=1, le=1000)
    """Share of this set among the prompts, 1 to 1000: weights 2 and 1 draw two prompts to one."""


ONE, SEVERAL = KINDS_OF_PATH = ("one", "several")
FILE_SUFFIXES = (".jsonl", ".parquet")
CONVERSION = "docs/data.md has commands that convert other formats"
HUB_NAME = re.compile(r"(?!data/)[\w-][\w.-]*(/[\w.-]+)?")
"""NAME or OWNER/NAME, but not a path below `data/`, the folder of the shipped configs' data."""


class DataConfig(Section):
    """Where prompts come from and how a row becomes a prompt."""

    path: Annotated[
        Annotated[str, Tag(ONE)]
        | Annotated[tuple[WeightedPath, ...], Field(strict=False), Tag(SEVERAL)],
        Discriminator(lambda value: SEVERAL if isinstance(value, list | tuple) else ONE),
    ]
    """A .jsonl or .parquet file, a folder of these, or the name of a Hugging Face data set; or a
    list of `{path: ..., weight: ...}`, mixed in proportion to the whole-number weights."""
    subset: str | None = None
    """Subset of a Hugging Face data set, such as `main` of openai/gsm8k; null for files."""
    split: str = "train"
    """Split of a Hugging Face data set; in a folder, the files named after it, such as `train-*`
    (all files if no file name has a split)."""
    prompt_column: str = "prompt"
    """Column of the question: a string, or chat messages; the last must not be the assistant's."""
    answer_column: str | None = "answer"
    """Column of the reference answer, passed to rewards as `answer`; null: none."""
    image_column: str | None = None
    """Column of images, placed before the user's first text (docs/images.md): a path relative to
    the folder of `path`, bytes, base64 (`data:image/...`), or a list of these. Null: no images."""
    system_prompt: str | None = None
    """System message put before every prompt; needs apply_chat_template."""
    apply_chat_template: bool = True
    """Whether prompts go through the tokenizer's chat template; false: the raw text is sent."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as `enable_thinking: false` for Qwen3."""
    date: str | None = None
    """Time that the chat template writes as today's (`strftime_now`), in ISO 8601, such as
    `2026-11-29T08:30:00+00:00`. Null: the time of the run's first start, saved in its
    config.yaml."""
    max_prompt_length: PositiveInt | None = None
    """Maximum prompt tokens; rows with longer prompts are left out. Null: a prompt that does not
    fit the model's context is an error."""
    on_invalid: Literal["error", "skip"] = "error"
    """Unusable rows: `error` lists them and stops, `skip` leaves them out."""
    shuffle: bool = True
    """Whether each epoch has its own random order, derived from train.seed; false: row order."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, and `date` in place of the clock."""
        if self.date is None:
            return self.chat_template_kwargs
        # Without its offset, as transformers' own `strftime_now` has none.
        start = datetime.fromisoformat(self.date).replace(tzinfo=None)
        return {**self.chat_template_kwargs, "strftime_now": start.strftime}

    @property
    def paths(self) -> tuple[WeightedPath, ...]:
        if isinstance(self.path, str):
            return (WeightedPath(path=self.path, weight=1),)
        return self.path

    def check_exists(self) -> None:
        """Raise ValueError for a missing path that cannot be a data set's name, and for other file
        formats."""
        for name in (each.path for each in self.paths):
            is_read = name.endswith(FILE_SUFFIXES)
            if (is_read or not HUB_NAME.fullmatch(name)) and not Path(name).exists():
                folder = "" if Path(name).is_absolute() else f" in {Path.cwd()}"
                raise ValueError(f"data.path {name} does not exist{folder}")
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
