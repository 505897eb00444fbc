"""Rows of data -> prompts of token ids -> the batch of every generation."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from checkpoint_convert import ModelShape
from megatron_grpo.config import Config, DataConfig
from megatron_grpo.rows import Row, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NUM_ROWS_SHOWN = 5

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One row of the data, ready for the engine."""

    index: int
    """Number of the row in the data, from 0."""
    token_ids: tuple[int, ...]
    text: str
    """What `token_ids` encode: chat template applied."""
    row: Row
    """The columns of the row; the reference answer also under the name `answer`."""


class PromptStream:
    """The prompts of a generation are a pure function of its number: resuming needs no state."""

    def __init__(
        self, prompts: Sequence[Prompt], batch_size: int, seed: int, shuffle: bool
    ) -> None:
        if batch_size > len(prompts):
            raise ValueError(
                f"one generation takes {batch_size} different prompts and the data has "
                f"{len(prompts)}: lower grpo.generation_batch_size to at most "
                f"{len(prompts)} * grpo.num_generations"
            )
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle

    def batch(self, generation_index: int) -> list[Prompt]:
        """The `batch_size` different prompts of generation `generation_index` (0, 1, ...).

        Shuffled, every epoch has its own order and leaves out the rows that fill no whole batch,
        other ones each time. Otherwise rows follow in order, the first after the last.
        """
        num_prompts, size = len(self.prompts), self.batch_size
        if not self.shuffle:
            start = generation_index * size
            return [self.prompts[i % num_prompts] for i in range(start, start + size)]
        epoch, batch = divmod(generation_index, num_prompts // size)
        order = _epoch_order(num_prompts, self.seed, epoch)
        return [self.prompts[i] for i in order[batch * size : (batch + 1) * size]]


@lru_cache(maxsize=1)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_prompts))
    # A string seeds by its SHA-512, the same in every Python and process.
    random.Random(f"prompts of epoch {epoch}, seed {seed}").shuffle(order)
    return order


def end_tokens(shape: ModelShape, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Tokens that end a completion: the model's own and the tokenizer's.

    Raises ValueError when there is none, since every sample would then run to the length limit.
    """
    tokens = {*shape.eos_token_ids, tokenizer.eos_token_id} - {None}
    if not tokens:
        raise ValueError(
            "neither the model's config.json nor its tokenizer has an end token: give config.json "
            "an eos_token_id"
        )
    return tuple(sorted(tokens))


def load_prompts(
    cfg: Config, tokenizer: "PreTrainedTokenizerBase", max_position_embeddings: int
) -> list[Prompt]:
    """Read the data of `cfg.data` and encode every prompt as the engine will get it.

    The model's context of `max_position_embeddings` tokens must hold the prompt and
    `rollout.max_completion_length` more. Raises ValueError for data that is missing, empty, without
    the named columns, or with prompts that are no text or too long.
    """
    data = cfg.data
    rows = read_rows(data)
    _check_columns(data, rows)
    chats = [_messages(data, index, row) for index, row in enumerate(rows)]
    texts, token_ids = _encode(data, tokenizer, chats)
    longest = _longest_prompt(cfg, max_position_embeddings)
    kept = _that_fit(data, [len(ids) for ids in token_ids], longest)
    return [
        Prompt(
            index=index,
            token_ids=tuple(token_ids[index]),
            text=texts[index],
            row=_reward_columns(data, rows[index]),
        )
        for index in kept
    ]


def _check_columns(data: DataConfig, rows: Sequence[Row]) -> None:
    wanted = {"data.prompt_column": data.prompt_column, "data.answer_column": data.answer_column}
    for key, column in wanted.items():
        lacking = [i for i, row in enumerate(rows) if column is not None and column not in row]
        if lacking:
            raise ValueError(
                f"{key} {column!r} is not a column of {data.path}: {len(lacking)} of {len(rows)} "
                f"rows lack it; row {lacking[0]} has {', '.join(map(repr, rows[lacking[0]]))}"
            )


def _messages(data: DataConfig, index: int, row: Row) -> str | Messages:
    """The prompt of a row: messages for the chat template, or the text that goes in as it is."""
    prompt = row[data.prompt_column]
    where = f"column {data.prompt_column!r} of row {index} in {data.path}"
    if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ValueError(
            f"{where} is {prompt!r}: it must be a text, or a list of messages with role and content"
        )
    if not data.apply_chat_template:
        if not isinstance(prompt, str):
            raise ValueError(f"{where} has chat messages: they need data.apply_chat_template=true")
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if data.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError(f"{where} has its own system message: leave data.system_prompt out")
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt
    )


def _encode(
    data: DataConfig, tokenizer: "PreTrainedTokenizerBase", chats: list[Any]
) -> tuple[list[str], list[list[int]]]:
    """Text and token ids of every prompt, tokenized all at once (fast tokenizers use all cores)."""
    if data.apply_chat_template and tokenizer.chat_template is None:
        raise ValueError(
            "the model's tokenizer has no chat template: set data.apply_chat_template=false to "
            "send prompts as they are"
        )
    texts = chats
    if data.apply_chat_template:
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    # The template has written the special tokens already.
    encoded = tokenizer(texts, add_special_tokens=not data.apply_chat_template)
    token_ids: list[list[int]] = encoded["input_ids"]
    wordless = [index for index, ids in enumerate(token_ids) if not ids]
    if wordless:
        raise ValueError(
            f"the model's tokenizer makes no tokens of row {wordless[0]} in {data.path}: "
            "are its files (tokenizer.json) in model.path?"
        )
    return texts, token_ids


def _longest_prompt(cfg: Config, max_position_embeddings: int) -> int:
    longest = max_position_embeddings - cfg.rollout.max_completion_length
    if longest < 1:
        raise ValueError(
            f"rollout.max_completion_length {cfg.rollout.max_completion_length} leaves no room for "
            f"a prompt in the model's context of {max_position_embeddings} tokens: "
            f"use at most {max_position_embeddings - 1}"
        )
    return longest


def _that_fit(data: DataConfig, lengths: Sequence[int], longest: int) -> list[int]:
    """Numbers of the rows to keep; one longer than the context is an error unless left out."""
    most = min(data.max_prompt_length or longest, longest)
    too_long = [index for index, length in enumerate(lengths) if length > most]
    if too_long and data.max_prompt_length is None:
        shown = ", ".join(f"row {index} ({lengths[index]})" for index in too_long[:NUM_ROWS_SHOWN])
        more = ", ..." if len(too_long) > NUM_ROWS_SHOWN else ""
        raise ValueError(
            f"{len(too_long)} of {len(lengths)} prompts have more than the {longest} tokens that "
            f"rollout.max_completion_length leaves of the model's context: {shown}{more}. "
            f"Set data.max_prompt_length to at most {longest} to leave them out"
        )
    if len(too_long) == len(lengths):
        raise ValueError(
            f"data.max_prompt_length {data.max_prompt_length} leaves out all {len(lengths)} "
            f"prompts: the shortest has {min(lengths)} tokens"
        )
    if too_long:
        logger.warning(
            "%d of %d prompts have more than %d tokens and are left out",
            *(len(too_long), len(lengths), most),
        )
    dropped = set(too_long)
    return [index for index in range(len(lengths)) if index not in dropped]


def _reward_columns(data: DataConfig, row: Row) -> Row:
    return row if data.answer_column is None else {**row, "answer": row[data.answer_column]}
