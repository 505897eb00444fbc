"""Samples made without an engine."""

from typing import Any

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample


def sample_of(
    text: str,
    row: dict[str, Any],
    index: int = 0,
    number: int = 0,
    prompt: Prompt | None = None,
    **fields: Any,
) -> Sample:
    """Completion `number` of the prompt `index`, or of `prompt`; `fields` may replace its single
    token."""
    prompt = prompt or Prompt(index=index, token_ids=(1,), text=f"prompt {index}", row=row)
    defaults = {
        "completion_ids": (1,),
        "logprobs": (0.0,) * len(fields.get("completion_ids", (1,))),
        "finish_reason": "stop",
        "policy_version": 0,
    }
    return Sample(prompt=prompt, sample_index=number, text=text, **defaults | fields)
