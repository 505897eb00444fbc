"""Samples for reward functions, which read their texts and the columns of their prompts."""

from typing import Any

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample


def sample_of(text: str, row: dict[str, Any], index: int = 0, number: int = 0) -> Sample:
    """Completion `number` of the prompt `index`."""
    return Sample(
        prompt=Prompt(index=index, token_ids=(1,), text=f"prompt {index}", row=row),
        sample_index=number,
        completion_ids=(1,),
        logprobs=(0.0,),
        finish_reason="stop",
        text=text,
        policy_version=0,
    )
