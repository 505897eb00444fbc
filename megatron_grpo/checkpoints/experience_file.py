"""The generation that a checkpoint was made inside of, and one that was ready behind it.

Prompts and sampling seeds are functions of the step. But the generation that is being trained on
was sampled from a policy that is gone: inside of one, samples and their log-probabilities under the
old policy, and under the reference of that time, are saved with the rest. So is, where generations
are made beside the training, the next one: nobody has log-probabilities of that yet.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.experience.experience import Experience
from megatron_grpo.rollout.samples import Sample
from parallel.packing import KNOWN

SAMPLES_FILE = "samples.jsonl"
TOKENS_FILE = "samples.safetensors"
READY = "ready_"
"""Before both names: of the generation that nobody has begun to train on."""
BY_TOKEN = (*KNOWN, "token_advantages")
"""What an experience has for all tokens of each completion, or not at all."""


def write_experience(folder: Path, experience: Experience, prefix: str = "") -> None:
    """Write samples, rewards, advantages and log-probabilities, bit for bit.

    `prefix` is READY for a generation that nobody has begun to train on.
    """
    samples = experience.samples
    assert prefix or experience.old_logprobs is not None, (
        "the policy that they are of is gone when this is read"
    )
    rows = [
        {
            "prompt": sample.prompt.index,
            "sample_index": sample.sample_index,
            "finish_reason": sample.finish_reason,
            "text": sample.text,
            "policy_version": sample.policy_version,
            "step_rewards": sample.step_rewards,
            "own_prompt": _own(sample.prompt),
            "rewards": rewards,
        }
        for sample, rewards in zip(samples, experience.rewards, strict=True)
    ]
    (folder / f"{prefix}{SAMPLES_FILE}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tensors = {
        "lengths": torch.tensor([len(sample.completion_ids) for sample in samples]),
        "completion_ids": _joined([sample.completion_ids for sample in samples], torch.int64),
        "loss_mask": _joined([sample.loss_mask for sample in samples], torch.bool),
        "rollout_logprobs": _joined([sample.logprobs for sample in samples], torch.float64),
        "totals": experience.totals,
        "group_ids": experience.group_ids,
        "advantages": experience.advantages,
    }
    for name in BY_TOKEN:
        if (values := getattr(experience, name)) is not None:
            tensors[name] = torch.cat(list(values))
    save_file(tensors, folder / f"{prefix}{TOKENS_FILE}")


def read_experience(folder: Path, prompts: Sequence[Prompt], prefix: str = "") -> Experience | None:
    """What `write_experience` wrote; None when the run stood between two generations.

    `prompts` are those of the data. Raises ValueError when one is no longer there.
    """
    samples_file = folder / f"{prefix}{SAMPLES_FILE}"
    if not samples_file.exists():
        return None
    rows = [json.loads(line) for line in samples_file.read_text().splitlines()]
    tensors = load_file(folder / f"{prefix}{TOKENS_FILE}")
    by_index = {prompt.index: prompt for prompt in prompts}
    missing = {row["prompt"] for row in rows} - by_index.keys()
    if missing:
        raise ValueError(
            f"{folder} trains on the rows {sorted(missing)} of the data, which are not there: is "
            "data.path another file than before?"
        )
    bounds = list(pairwise([0, *accumulate(tensors["lengths"].tolist())]))
    samples = [
        Sample(
            prompt=_prompt(by_index[row["prompt"]], row["own_prompt"]),
            sample_index=row["sample_index"],
            completion_ids=tuple(tensors["completion_ids"][start:end].tolist()),
            logprobs=tuple(tensors["rollout_logprobs"][start:end].tolist()),
            finish_reason=row["finish_reason"],
            text=row["text"],
            policy_version=row["policy_version"],
            loss_mask=tuple(tensors["loss_mask"][start:end].tolist()),
            step_rewards=tuple((token, reward) for token, reward in row["step_rewards"]),
        )
        for row, (start, end) in zip(rows, bounds, strict=True)
    ]
    return Experience(
        samples=samples,
        rewards=[row["rewards"] for row in rows],
        totals=tensors["totals"],
        group_ids=tensors["group_ids"],
        advantages=tensors["advantages"],
        **{
            name: [tensors[name][start:end] for start, end in bounds]
            for name in BY_TOKEN
            if name in tensors
        },
    )


def _own(prompt: Prompt) -> dict[str, Any] | None:
    """What a prompt is where an environment has made it another than the data's."""
    if prompt.first_observation is None:
        return None
    return {name: getattr(prompt, name) for name in ("token_ids", "text", "first_observation")}


def _prompt(prompt: Prompt, own: dict[str, Any] | None) -> Prompt:
    return replace(prompt, **own | {"token_ids": tuple(own["token_ids"])}) if own else prompt


def _joined(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
