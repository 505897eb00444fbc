"""Reward `reward_model`: the logit of a classification model, served by vLLM's pooling runner."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from megatron_grpo.rewards.functions import StepScores
from megatron_grpo.rewards.http import (
    DEFAULT_KEY,
    MAX_TEXT,
    SHARE_OF_TIME,
    Unscored,
    check_base_url,
    http_client,
    key_from,
    post,
)
from parallel.clock import running_time
from parallel.words import counted

TEXT_ARCHITECTURES = ("ForSequenceClassification",)
STEP_ARCHITECTURES = ("ForProcessRewardModel",)
"""Endings of architecture names, for models that score texts and models that score steps."""
WEIGHTS = ("*.safetensors", "*.bin")
DEFAULT_LABELS = range(2)
"""transformers' default labels for a config.json without labels."""
STEP_SEPARATOR = "\n\n"

Chat = str | list[dict[str, str]]


async def reward_model(
    completions: list[str],
    prompt_messages: list[Chat],
    *,
    path: str | None = None,
    base_url: str | None = None,
    api_key_env: str = DEFAULT_KEY,
    api_key: SecretStr | None = None,
    step_tag: str | None = None,
    step_separator: str = STEP_SEPARATOR,
    tensor_parallel_size: int = 1,
    share_gpus: bool = False,
    vllm: dict[str, Any] | None = None,
    reward_timeout: float,
    **_: Any,
) -> list[float | StepScores | Unscored]:
    """The logit that a model gives the prompt with the completion; Unscored without a logit.

    The model is a folder `path`, served by the run itself on `tensor_parallel_size` GPUs of its own
    or shared with the ranks (`share_gpus`), with the engine arguments `vllm`; or a vLLM server at
    `base_url`. Its chat template and tokenizer encode the prompt's messages and the completion as
    the assistant's; if the policy has no chat template, the model reads the text of both.

    With `step_tag`, a token of the model, it is a process reward model (arXiv 2501.07301). Steps
    are the text between `step_separator`, which the tag replaces; the model scores a step at its
    tag, by the probability of the second of two labels, or by the logit of a single label.
    """
    _check(path, base_url, api_key, step_separator)
    _check_server(base_url, tensor_parallel_size, share_gpus, vllm)
    if path is not None:
        check_folder(Path(path), of_steps=step_tag is not None)
    if not completions:
        return []
    assert base_url is not None, "the run has put the address in place of the path"
    deadline = running_time() + SHARE_OF_TIME * reward_timeout
    key = api_key.get_secret_value() if api_key else key_from(api_key_env)
    async with http_client(base_url, key) as client:

        async def score(chat: Chat, text: str) -> float | StepScores | Unscored:
            steps = steps_of(text, step_separator) if step_tag is not None else []
            tagged = "".join(f"{step}{step_tag}" for _, step in steps) or text
            try:
                body = request_of(chat, tagged)
                pooled = _pooled(await post(client, base_url, "pooling", body, deadline))
                if step_tag is None:
                    return _score(pooled)
                return StepScores([end for end, _ in steps], _step_scores(pooled, len(steps)))
            except Unscored as error:
                return error

        return await asyncio.gather(*map(score, prompt_messages, completions))


def _check(
    path: str | None, base_url: str | None, api_key: SecretStr | None, step_separator: str
) -> None:
    if (path is None) == (base_url is None):
        raise ValueError(
            "give either path, the folder of a model that the run is to serve, or base_url, the "
            "address of a vLLM that serves it, such as http://host:8000"
        )
    if base_url is not None:
        check_base_url(base_url)
    if isinstance(api_key, str):
        raise ValueError("api_key: name the environment variable that has the key, in api_key_env")
    if not step_separator:
        raise ValueError("step_separator is empty: give the text between two steps")


def _check_server(
    base_url: str | None, size: int, share_gpus: bool, vllm: dict[str, Any] | None
) -> None:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel_size {size!r}: give a number of GPUs")
    if not isinstance(share_gpus, bool):
        raise ValueError(f"share_gpus {share_gpus!r}: give true or false")
    if not isinstance(vllm or {}, dict):
        raise ValueError(f"vllm {vllm!r}: give a table of arguments, such as max_model_len: 8192")
    if base_url is not None and (vllm or share_gpus or size > 1):
        raise ValueError(
            "tensor_parallel_size, share_gpus and vllm are for a model that the run serves: path"
        )


def check_folder(path: Path, *, of_steps: bool) -> None:
    """Raise ValueError unless `path` holds a model that scores texts, or with `of_steps`, steps."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"path {path} is no folder of a model: config.json: {error}") from None
    architecture = (config.get("architectures") or ["model without architectures"])[0]
    wanted, what = (STEP_ARCHITECTURES, "steps") if of_steps else (TEXT_ARCHITECTURES, "texts")
    if not architecture.endswith(wanted):
        hint = ": set step_tag" if architecture.endswith(STEP_ARCHITECTURES) else ""
        raise ValueError(
            f"path {path} holds a {architecture}, not a model that scores {what} "
            f"(...{' or ...'.join(wanted)}){hint}"
        )
    num_labels = config.get("num_labels", len(config.get("id2label", DEFAULT_LABELS)))
    if not of_steps and num_labels != 1:
        raise ValueError(
            f"path {path} classifies into {num_labels} labels, and a reward model has one: its "
            "config.json has num_labels 1"
        )
    if not any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        raise ValueError(f"path {path} holds no weights ({', '.join(WEIGHTS)})")


def request_of(chat: Chat, completion: str) -> dict[str, Any]:
    """Request to score `completion` as the answer to `chat`."""
    # vLLM's default would turn the logit into a probability.
    body: dict[str, Any] = {"use_activation": False}
    if isinstance(chat, str):
        return body | {"input": chat + completion}
    return body | {"messages": [*chat, {"role": "assistant", "content": completion}]}


def steps_of(text: str, separator: str) -> list[tuple[int, str]]:
    """(end, text) of each step that is not blank; `end` is the index behind the step's separator. A
    text without a step is a single one.

    >>> steps_of("a\\n\\nb", "\\n\\n")
    [(3, 'a'), (4, 'b')]
    """
    steps: list[tuple[int, str]] = []
    position = 0
    for piece in text.split(separator):
        end = min(position + len(piece) + len(separator), len(text))
        if piece.strip():
            steps.append((end, piece))
        elif steps:
            steps[-1] = (end, steps[-1][1])
        position = end
    return steps or [(len(text), text)]


def _score(pooled: Any) -> float:
    match pooled:
        case [float() | int() as score] | [[float() | int() as score]]:
            return float(score)
        case other:
            raise Unscored(f"not the one score of a text: {str(other)[:MAX_TEXT]}")


def _step_scores(pooled: Any, num_steps: int) -> list[float]:
    if not isinstance(pooled, list) or len(pooled) != num_steps:
        raise Unscored(
            f"not {counted(num_steps, 'score')}, one for each step, which ends with step_tag: "
            f"{str(pooled)[:MAX_TEXT]}"
        )
    return [_step_score(labels) for labels in pooled]


def _step_score(labels: Any) -> float:
    match labels:
        case [float() | int() as logit]:
            return float(logit)
        case [float() | int() as wrong, float() | int() as right]:
            return (1 + math.tanh((right - wrong) / 2)) / 2  # softmax, without overflow
        case _:
            raise Unscored(f"not the logits of 1 or 2 labels: {str(labels)[:MAX_TEXT]}")


def _pooled(answered: str) -> Any:
    try:
        [pooled] = json.loads(answered)["data"]
        return pooled["data"]
    except (ValueError, LookupError, TypeError):
        raise Unscored(f"not what vLLM's /pooling answers: {answered[:MAX_TEXT]}") from None
