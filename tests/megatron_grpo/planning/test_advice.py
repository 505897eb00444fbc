"""Advice of a plan is accepted as overrides, and what it says fits does."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from helpers.models.published import write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.command import print_plan, print_suggestions

CONFIGS = Path(__file__).parents[3] / "configs"
FEW = "grpo.generation_batch_size=512"
SYNCHRONOUS = ("rollout.max_staleness=0", "rollout.in_flight_updates=false")
NEMO_RL = ("parallel.tensor_parallel_size=4", "parallel.data_parallel_size=4")
ASLEEP = (*NEMO_RL, "rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.8")
ON_HOST = ("optimizer.optimizer_cpu_offload=true", "grpo.beta=0.04")


@dataclass(frozen=True)
class Hint:
    """Overrides that a message names."""

    overrides: list[str]
    fits: bool
    """Whether the message says that they fit."""
    num_gpus: int | None = None


def hints(message: str) -> Iterator[Hint]:
    for found in re.finditer(r"it fits with ([^;]+)", message):
        yield Hint(shlex.split(found[1]), fits=True)
    for found in re.finditer(r"layout that fits: (.*)$", message):
        yield Hint(shlex.split(found[1]), fits=True)
    for found in re.finditer(r"use --gpus (\d+) or more", message):
        yield Hint([], fits=False, num_gpus=int(found[1]))
    for found in re.finditer(r"set (\w+\.\S+=\S+)", message):
        yield Hint([found[1]], fits=False)
    for found in re.finditer(r"(\S+memory_utilization) .* use (\S+) or more", message):
        yield Hint([f"{found[1]}={found[2]}"], fits=False)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """The message with which a plan, or suggestions, of a config are refused; "" if they are not.

    Nodes have `host_memory`.
    """

    def run(name, model, *overrides, num_gpus=None, host_memory=2 * 10**12, show=print_plan):
        card = replace(CARDS["h100"], host_memory=host_memory)
        monkeypatch.setitem(CARDS, "h100", card)
        path = write_config(tmp_path / model, model)
        given = [f"model.path={path}", FEW, *overrides]
        cfg = load_config(CONFIGS / f"grpo_{name}.yaml", given)
        try:
            show(cfg, gpu="h100", num_gpus=num_gpus, lengths_file=None, as_json=True)
        except ValueError as error:
            return str(error)
        return ""

    return run


LLAMA_70B, LLAMA_8B = ("70b", "Llama-3.3-70B"), ("8b", "Llama-3.1-8B")


@pytest.mark.parametrize(
    ("job", "overrides", "options", "expected"),
    [
        (LLAMA_70B, NEMO_RL, {}, "layout that fits"),
        (LLAMA_70B, (*NEMO_RL, *ON_HOST), {}, "layout that fits"),
        (LLAMA_70B, ASLEEP, {}, "it fits with train.offload=all"),
        (LLAMA_70B, (*ASLEEP, "grpo.beta=0.04"), {}, "it fits with train.offload=all"),
        # The optimizer's state is on the host already; pushes need quantised weights' maxima.
        (LLAMA_70B, (*ASLEEP, *ON_HOST), {}, "no layout fits on 64 GPUs: use more GPUs"),
        (
            LLAMA_70B,
            (*ASLEEP, "rollout.quantization=fp8"),
            {},
            "fits: train.offload=opti",
        ),
        (
            LLAMA_70B,
            (*ASLEEP, "train.offload=all"),
            {"host_memory": 300 * 10**9},
            "270.0: 181.6 for train.offload, 181.6 for a checkpoint",
        ),
        (
            LLAMA_70B,
            (
                *(*ASLEEP, "rollout.vllm.gpu_memory_utilization=0.35"),
                *("train.offload=all", "train.offload_communicators=true"),
            ),
            {"host_memory": 330 * 10**9},
            "it fits with train.offload=optimizer train.offload_communicators=false",
        ),
        (
            LLAMA_70B,
            (*NEMO_RL, *ON_HOST),
            {"host_memory": 100 * 10**9},
            "for optimizer.optimizer_cpu_offload",
        ),
        (
            ("70b_lora", "Llama-3.3-70B"),
            ("rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.5"),
            {"host_memory": 150 * 10**9},
            "for engines that sleep with lora.sync adapter.* fits with lora.sync=merged",
        ),
        (LLAMA_70B, (), {"num_gpus": 32}, "use --gpus 64 or more"),
        (LLAMA_70B, ["rollout.vllm.gpu_memory_utilization=0.2"], {}, "0.2 leaves nothing"),
        (LLAMA_8B, ["train.max_tokens_per_microbatch=65536"], {}, "layout that fits"),
        (LLAMA_8B, ["parallel.tensor_parallel_size=8"], {"num_gpus": 1}, "use --gpus 24 or more"),
        (LLAMA_8B, ["rollout.tensor_parallel_size=8"], {"num_gpus": 8}, "use --gpus 40 or more"),
        (
            LLAMA_8B,
            ["rollout.tensor_parallel_size=8"],
            {"num_gpus": 8, "show": print_suggestions},
            "use --gpus 9 or more",
        ),
        (
            LLAMA_8B,
            [*SYNCHRONOUS, "rollout.num_engines=1", "rollout.tensor_parallel_size=8"],
            {"num_gpus": 8},
            "use --gpus 9 or more, or smaller engines",
        ),
        (
            ("30b_a3b", "Qwen3-30B-A3B"),
            ["parallel.expert_parallel_size=1", "train.max_tokens_per_microbatch=65536"],
            {},
            "layout that fits",
        ),
    ],
)
def test_advice_is_accepted_and_what_is_said_to_fit_does(
    refused, job, overrides, options, expected
):
    message = refused(*job, *overrides, **options)
    assert re.search(expected, message)
    for hint in hints(message):
        others = options | ({"num_gpus": hint.num_gpus} if hint.num_gpus else {})
        again = refused(*job, *overrides, *hint.overrides, **others)
        assert again == "" or not hint.fits, hint
        assert not any(words in again for words in ("use --gpus", "share", "leaves nothing")), hint
    if "optimizer.optimizer_cpu_offload=true" in overrides:
        assert "train.offload=" not in message
