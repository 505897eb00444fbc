"""Prompts: the keys of `data`, and of `eval.data`."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_grpo.config.config_section import Section

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
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What transformers' `apply_chat_template` takes for itself, or gives the template by itself."""


class DataConfig(Section):
    """Where prompts come from and how a row becomes a prompt."""

    path: str
    """A .jsonl or .parquet file, a folder of them, or the name of a Hugging Face data set."""
    subset: str | None = None
    """Configuration of a Hugging Face data set, such as `main` of openai/gsm8k; null for files."""
    split: str = "train"
    """Split of a Hugging Face data set; of a folder the files named by it, such as `train-*`, or
    all where none is named by any."""
    prompt_column: str = "prompt"
    """Column with the question: a string, or chat messages, the last not the assistant's."""
    answer_column: str | None = "answer"
    """Column with the reference answer, which rewards get under the name `answer`; null: none."""
    system_prompt: str | None = None
    """Put before every prompt as the system message; needs the chat template."""
    apply_chat_template: bool = True
    """Whether prompts go through the tokenizer's chat template; false sends the raw text."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as `enable_thinking: false` of Qwen3."""
    max_prompt_length: PositiveInt | None = None
    """Leave out rows whose prompt has more tokens. null: a prompt that does not fit is an error."""
    on_invalid: Literal["error", "skip"] = "error"
    """What to do about rows that cannot be used: list them and stop, or leave them out."""
    shuffle: bool = True
    """Whether every epoch has its own order, derived from train.seed; false: the order of rows."""

    @model_validator(mode="after")
    def _system_prompt_needs_template(self) -> Self:
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError(
                "data.system_prompt is a chat message: it needs data.apply_chat_template=true"
            )
        return self

    @model_validator(mode="after")
    def _kwargs_are_the_templates(self) -> Self:
        if self.chat_template_kwargs and not self.apply_chat_template:
            raise ValueError(
                "data.chat_template_kwargs are for the chat template: they need "
                "data.apply_chat_template=true"
            )
        for name in sorted(OWN_TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ValueError(
                f"data.chat_template_kwargs.{name} is not free: give variables of the chat "
                "template, such as enable_thinking"
            )
        return self
