"""Turn rows of data into prompts of token ids."""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

import yaml

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.sources import ALONE, SourcesConfig
from megatron_grpo.config.yaml_text import Loader
from megatron_grpo.data.encoding import Chat, Encoded, chat_of, encode_rows, writes_date
from megatron_grpo.data.images import ImageReader, PromptSources
from megatron_grpo.data.rows import Fault, InvalidRows, Record, Row, read_rows
from parallel.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOO_LONG = "too long for the model's context"


@dataclass(frozen=True)
class Prompt:
    """One row of the data, ready for the engine."""

    index: int
    """Number of the row in the data, from 0."""
    token_ids: Sequence[int]
    """An array of int32."""
    text: str
    """The text that `token_ids` encode, with the chat template applied."""
    row: Row
    """The columns of the row, with the reference answer also as `answer`."""
    path: int = 0
    """Index of its path in `data.path`, if that is a list."""
    source: str = ALONE
    """Name of its source in `sources`."""
    is_own: bool = False
    """Whether a single sample has this prompt: its environment changed it, or its agent made it."""
    images: PromptSources | None = None
    data: DataConfig | None = None
    """Settings by which `row` became `text`; None for a prompt that is text only."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", array("i", self.token_ids))

    @cached_property  # decodes images in base64, and each sample's row asks for it
    def messages(self) -> Chat:
        """Messages that `text` was rendered from; without a chat template, `text` itself."""
        if self.data is None or not self.data.apply_chat_template:
            return self.text
        chat = chat_of(self.data, self.row)
        assert not isinstance(chat, Fault), "it has become a prompt"
        return chat


def end_tokens(
    shape: ModelShape, tokenizer: "PreTrainedTokenizerBase", rollout: RolloutConfig
) -> tuple[int, ...]:
    """Collect the end tokens of the model, the tokenizer and `rollout.stop_token_ids`. Raises
    ValueError if there are none, and for a token outside the vocabulary."""
    if (most := max(rollout.stop_token_ids, default=0)) >= shape.vocab_size:
        raise ValueError(
            f"rollout.stop_token_ids has {most}, and the model's vocabulary ends at "
            f"{shape.vocab_size - 1}"
        )
    tokens = {*shape.eos_token_ids, tokenizer.eos_token_id, *rollout.stop_token_ids} - {None}
    if not tokens:
        raise ValueError(
            "neither the model's config.json nor its tokenizer has an end token: give config.json "
            "an eos_token_id, or set rollout.stop_token_ids"
        )
    return tuple(sorted(tokens))


def with_date(cfg: Config, tokenizer: "PreTrainedTokenizerBase") -> Config:
    """Set `data.date` to the time that the chat template writes, if it writes one. It is the date
    saved by the run in `train.run_dir`, or by the replayed run; otherwise now."""
    if cfg.data.date is not None or not writes_date(tokenizer):
        return cfg
    saved, date = (cfg.train.replay or cfg.train.run_dir) / "config.yaml", None
    if saved.exists():  # as text: keys of that run may have other names by now
        date = yaml.load(saved.read_text(encoding="utf-8"), Loader)["data"].get("date")
    date = date or datetime.now().astimezone().isoformat(timespec="seconds")
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"date": date})})


def load_prompts(
    cfg: Config,
    tokenizer: "PreTrainedTokenizerBase",
    max_position_embeddings: int,
    *,
    fault_of: Callable[[Row], Fault | None] = lambda row: None,
    limit: str = "rollout.max_completion_length",
    warns: bool = True,
) -> list[Prompt]:
    """Read the data of `cfg.data` and encode every prompt as the engine will receive it.

    The model's context of `max_position_embeddings` tokens must hold the prompt and a completion of
    `rollout.max_completion_length` tokens; `limit` is that key's name in errors. Rows that cannot
    be used, or have a fault according to `fault_of`, are listed in one ValueError, or left out if
    `data.on_invalid` is skip. `warns` logs how many rows are left out, also by
    `data.max_prompt_length`.
    """
    longest = _longest_prompt(cfg, max_position_embeddings, limit)
    prompts: list[Prompt] = []
    first_row, reader = 0, ImageReader.of(cfg)
    for number, each in enumerate(cfg.data.paths):
        data, invalid = cfg.data.model_copy(update={"path": each.path}), InvalidRows()
        records = read_rows(data, each.path, invalid, first_row)
        num_rows = len(records) + len(invalid)
        found = _encoded(data, cfg.sources, tokenizer, records, invalid, fault_of, longest, reader)
        if invalid:
            _settle(data, invalid, num_rows, longest, warns=warns)
        found = _short_ones(data, found, longest, warns=warns)
        prompts += [replace(prompt, path=number) for prompt in found] if number else found
        first_row += num_rows
    return prompts


def _encoded(
    data: DataConfig,
    sources: SourcesConfig,
    tokenizer: "PreTrainedTokenizerBase",
    records: Sequence[Record],
    invalid: InvalidRows,
    fault_of: Callable[[Row], Fault | None],
    longest: int,
    reader: ImageReader | None,
) -> list[Prompt]:
    _check_columns(data, sources, records)
    prompts = []
    found = encode_rows(data, tokenizer, [record.row for record in records], reader)
    for record, encoded in zip(records, found, strict=True):
        row = record.row
        if data.answer_column in row:
            row = {**row, "answer": row[data.answer_column]}
        if isinstance(encoded, Encoded):
            size, fault = len(encoded.token_ids), _source_fault(sources, row) or fault_of(row)
            if not fault and size > longest and data.max_prompt_length is None:
                fault = Fault(TOO_LONG, f"{size} tokens of at most {longest}")
            encoded = fault or encoded
        if isinstance(encoded, Fault):
            invalid.add(record.index, record.place, encoded)
        else:
            prompts.append(
                Prompt(
                    record.index,
                    encoded.token_ids,
                    encoded.text,
                    row,
                    source=sources.of(row),
                    images=encoded.images,
                    data=data,
                )
            )
    return prompts


def _source_fault(sources: SourcesConfig, row: Row) -> Fault | None:
    if sources.column is None:
        return None
    if row.get(sources.column) is None:
        return Fault(f"no {sources.column}")
    if sources.of(row) not in sources.by_name:
        return Fault(
            f"{sources.column} not in sources.by_name ({', '.join(sources.by_name)})",
            repr(row[sources.column]),
        )
    return None


def _check_columns(data: DataConfig, sources: SourcesConfig, records: Sequence[Record]) -> None:
    """Raise ValueError for a column that no row has, a mistake in the config."""
    wanted = {
        "data.prompt_column": data.prompt_column,
        "data.answer_column": data.answer_column,
        "data.image_column": data.image_column,
        "sources.column": sources.column,
    }
    for key, column in wanted.items():
        if column and records and not any(column in record.row for record in records):
            raise ValueError(
                f"{key} {column!r} is not a column of {data.path}: {records[0].place} has "
                f"{', '.join(map(repr, records[0].row))}"
            )


def _longest_prompt(cfg: Config, max_position_embeddings: int, limit: str) -> int:
    longest = max_position_embeddings - cfg.rollout.max_completion_length
    if longest < 1:
        raise ValueError(
            f"{limit} {cfg.rollout.max_completion_length} leaves no room for a prompt in the "
            f"model's context of {max_position_embeddings} tokens (max_position_embeddings of its "
            "config.json, or the original one of longrope): use at most "
            f"{max_position_embeddings - 1}"
        )
    return longest


def _settle(
    data: DataConfig, invalid: InvalidRows, num_rows: int, longest: int, *, warns: bool
) -> None:
    found = f"{len(invalid)} of {num_rows} rows of {data.path}"
    if data.on_invalid == "skip" and len(invalid) < num_rows:
        if warns:
            logger.warning("%s cannot be used and are left out: %s", found, invalid.summary)
        return
    shorter = (
        f"; data.max_prompt_length={longest} leaves out only those that are {TOO_LONG}"
        if TOO_LONG in invalid.kinds
        else ""
    )
    raise ValueError(
        f"{found} cannot be used ({invalid.summary}):{invalid.listing}\nCorrect them, or leave "
        f"them out with data.on_invalid=skip, if others remain{shorter}"
    )


def _short_ones(
    data: DataConfig, prompts: list[Prompt], longest: int, *, warns: bool
) -> list[Prompt]:
    """Select the prompts within `data.max_prompt_length` and the model's context."""
    most = min(data.max_prompt_length or longest, longest)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    short = [prompt for prompt in prompts if len(prompt.token_ids) <= most]
    if not short:
        raise ValueError(
            f"data.max_prompt_length {data.max_prompt_length} leaves out all "
            f"{counted(len(prompts), 'prompt')}: the shortest has {counted(min(lengths), 'token')}"
        )
    if warns and len(short) < len(prompts):
        logger.warning(
            "%d of %d prompts of %s have more than %d tokens and are left out",
            *(len(prompts) - len(short), len(prompts), data.path, most),
        )
    return short
