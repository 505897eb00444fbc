"""Saves and loads ready generations, and the samples of unfinished ones. With generation ahead of
training, a resumed run cannot make them again: their weights no longer exist."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_grpo.batch.experience import Experience
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Branch, Heard, Sample

SAMPLES_FILE = "samples.jsonl"
TOKENS_FILE = "samples.safetensors"
READY, OPEN = "ready_", "open_"
"""Prefixes of both files: of the next generation, and of the samples in open groups."""


def ready_prefix(number: int) -> str:
    """Prefix of ready generation `number`, counted from 0: `ready_`, `ready_1_`, ..."""
    return f"{READY}{number}_" if number else READY


def write_experience(folder: Path, experience: Experience, prefix: str) -> None:
    """Write samples, rewards, advantages and log-probabilities, bit for bit."""
    samples = experience.samples
    rows = [
        {
            "prompt": sample.prompt.index,
            "sample_index": sample.sample_index,
            "finish_reason": sample.finish_reason,
            "text": sample.text,
            "policy_version": sample.policy_version,
            "versions": sample.versions,
            "step_rewards": sample.step_rewards,
            **({"temperature": sample.temperature} if sample.temperature else {}),
            **({"branches": sample.branches} if sample.branches else {}),
            **({"heard": sample.heard} if sample.heard else {}),
            **({"metrics": sample.metrics} if sample.metrics else {}),
            **({"failure": sample.failure} if sample.failure else {}),
            "own_prompt": _own(sample.prompt),
            "rewards": rewards,
        }
        for sample, rewards in zip(samples, experience.rewards, strict=True)
    ]
    (folder / f"{prefix}{SAMPLES_FILE}").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    tensors = {
        "lengths": torch.tensor([len(sample.completion_ids) for sample in samples]),
        "completion_ids": _joined([sample.completion_ids for sample in samples], np.int32),
        "loss_mask": _joined([sample.loss_mask for sample in samples], np.bool_),
        "rollout_logprobs": _joined([sample.logprobs for sample in samples], np.float32),
        "totals": experience.totals,
        "group_ids": experience.group_ids,
        "advantages": experience.advantages,
    }
    routes = [sample.routes for sample in samples]
    if known := [each for each in routes if each is not None]:
        tensors["routed_tokens"] = torch.tensor([0 if r is None else len(r) for r in routes])
        tensors["routed_experts"] = torch.from_numpy(np.concatenate(known))
    if experience.token_advantages is not None:
        tensors["token_advantages"] = torch.cat(experience.token_advantages)
    save_file(tensors, folder / f"{prefix}{TOKENS_FILE}")


def read_experience(folder: Path, prompts: Sequence[Prompt], prefix: str) -> Experience | None:
    """Read the files that `write_experience` wrote for `prefix`; None if there are none. Raises
    ValueError if `prompts`, the data, lack a prompt of these samples."""
    samples_file = folder / f"{prefix}{SAMPLES_FILE}"
    if not samples_file.exists():
        return None
    rows = [json.loads(line) for line in samples_file.read_text(encoding="utf-8").splitlines()]
    tensors = load_file(folder / f"{prefix}{TOKENS_FILE}")
    by_index = {prompt.index: prompt for prompt in prompts}
    missing = {row["prompt"] for row in rows} - by_index.keys()
    if missing:
        raise ValueError(
            f"{folder} has samples of the rows {sorted(missing)} of the data, which no longer "
            "exist: has data.path changed?"
        )
    bounds = list(pairwise([0, *accumulate(tensors["lengths"].tolist())]))
    samples = [
        Sample(
            prompt=_with_own(by_index[row["prompt"]], row["own_prompt"]),
            sample_index=row["sample_index"],
            completion_ids=tensors["completion_ids"][start:end].tolist(),
            logprobs=tensors["rollout_logprobs"][start:end].tolist(),
            finish_reason=row["finish_reason"],
            text=row["text"],
            policy_version=row["policy_version"],
            versions=tuple((version, count) for version, count in row.get("versions", ())),
            temperature=row.get("temperature"),
            loss_mask=tensors["loss_mask"][start:end].tolist(),
            step_rewards=tuple((token, reward) for token, reward in row["step_rewards"]),
            metrics=row.get("metrics", {}),
            failure=row.get("failure", ""),
            heard=tuple(Heard(*map(tuple, each)) for each in row.get("heard", ())),
            branches=tuple(
                Branch(tuple((a, b) for a, b in context), start, end)
                for context, start, end in row.get("branches", ())
            ),
            routes=routes,
        )
        for row, (start, end), routes in zip(rows, bounds, _routes(tensors), strict=True)
    ]
    return Experience(
        samples=samples,
        rewards=[row["rewards"] for row in rows],
        totals=tensors["totals"],
        group_ids=tensors["group_ids"],
        advantages=tensors["advantages"],
        token_advantages=None
        if (by_token := tensors.get("token_advantages")) is None
        else [by_token[start:end] for start, end in bounds],
    )


def _routes(tensors: Mapping[str, Tensor]) -> list[np.ndarray | None]:
    if "routed_experts" not in tensors:
        return [None] * len(tensors["lengths"])
    parts = tensors["routed_experts"].split(tensors["routed_tokens"].tolist())
    return [part.numpy() if len(part) else None for part in parts]


def _own(prompt: Prompt) -> dict[str, Any] | None:
    """Fields of a prompt that belongs to a single sample; None for a prompt of the data."""
    if not prompt.is_own:
        return None
    own = {"token_ids": [*prompt.token_ids], "text": prompt.text, "is_own": True}
    return own | ({"places": prompt.images.places} if prompt.images else {})


def _with_own(prompt: Prompt, own: Mapping[str, Any] | None) -> Prompt:
    """A prompt of the data with the `_own` fields of a sample's."""
    if own is None:
        return prompt
    fields = {name: value for name, value in own.items() if name != "places"}
    places = tuple((image, start) for image, start in own.get("places", ()))
    images = replace(prompt.images, places=places) if prompt.images and places else None
    return replace(prompt, **fields, images=images)


def _joined(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(row, dtype) for row in rows]))
