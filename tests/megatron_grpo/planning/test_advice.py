"""Advice of a plan is accepted as overrides, and fits where it says so."""

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
SYNCHRONOUS = "rollout.max_staleness=0 rollout.in_flight_updates=false"
NEMO_RL = "parallel.tensor_parallel_size=4 parallel.data_parallel_size=4"
SLEEPS, SHARE = "rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization="
ASLEEP = f"{NEMO_RL} {SLEEPS} {SHARE}0.8"
ON_HOST = "optimizer.optimizer_cpu_offload=true grpo.beta=0.04"
ALL = "train.offload=all"
STAYS = (
    "train.offload=none parallel.tensor_parallel_size=8 parallel.data_parallel_size=1 "
    "model.megatron.recompute_granularity=full model.megatron.recompute_method=uniform "
    "model.megatron.recompute_num_layers=1"
)
LONG = "train.max_tokens_per_microbatch=65536"


@dataclass(frozen=True)
class Hint:
    """Overrides that a message names."""

    overrides: list[str]
    fits: bool
    """Whether the message says that they fit."""
    num_gpus: int | None = None


def hints(message: str) -> Iterator[Hint]:
    for found in re.finditer(r"hint: fits with (.+)", message):
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
    """The error message of a plan or of suggestions, empty if accepted; nodes have
    `host_memory`."""

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


def on_hosts(gigabytes):
    return {"host_memory": gigabytes * 10**9}


ENGINE_OF_8 = "rollout.tensor_parallel_size=8"
ADVISED = [
    (LLAMA_70B, NEMO_RL, {}, "layout that fits"),
    (LLAMA_70B, f"{NEMO_RL} {ON_HOST}", {}, "layout that fits"),
    (LLAMA_70B, ASLEEP, {}, "\nhint: fits with train.offload=all"),
    (LLAMA_70B, f"{ASLEEP} grpo.beta=0.04", {}, "\nhint: fits with train.offload=all"),
    (LLAMA_70B, f"{ASLEEP} {ON_HOST}", {}, "\nhint: fits with train.offload=all"),
    (LLAMA_70B, f"{ASLEEP} rollout.quantization=fp8", {}, "hint: fits with train.offload=all"),
    (
        *(LLAMA_70B, f"{ASLEEP} {ALL}", on_hosts(300)),
        "270.0: 181.6 for train.offload, 181.6 for a checkpoint",
    ),
    (
        *(LLAMA_70B, f"{ASLEEP} {SHARE}0.35 {ALL} train.offload_communicators=true", on_hosts(330)),
        "\nhint: fits with train.offload=optimizer train.offload_communicators=false",
    ),
    (LLAMA_70B, f"{NEMO_RL} {ON_HOST}", on_hosts(100), "for optimizer.optimizer_cpu_offload"),
    (
        *(("70b_lora", "Llama-3.3-70B"), f"{STAYS} {SHARE}0.5", on_hosts(150)),
        "(?s)for engines that sleep with lora.sync adapter.*\nhint: fits with lora.sync=merged",
    ),
    (LLAMA_70B, "", {"num_gpus": 32}, "use --gpus 64 or more"),
    (LLAMA_70B, f"{SHARE}0.2", {}, "0.2 leaves nothing"),
    (LLAMA_8B, LONG, {}, "layout that fits"),
    (LLAMA_8B, "parallel.tensor_parallel_size=8", {"num_gpus": 1}, "use --gpus 24 or more"),
    (LLAMA_8B, ENGINE_OF_8, {"num_gpus": 8}, "use --gpus 40 or more"),
    (LLAMA_8B, ENGINE_OF_8, {"num_gpus": 8, "show": print_suggestions}, "use --gpus 9 or more"),
    (
        *(LLAMA_8B, f"{SYNCHRONOUS} rollout.num_engines=1 {ENGINE_OF_8}", {"num_gpus": 8}),
        "use --gpus 9 or more, or smaller engines",
    ),
    (
        *(("30b_a3b", "Qwen3-30B-A3B"), f"parallel.expert_parallel_size=1 {LONG}", {}),
        "layout that fits",
    ),
]


@pytest.mark.parametrize(("job", "words", "options", "expected"), ADVISED)
def test_advice_is_accepted_and_fits_where_it_says_so(refused, job, words, options, expected):
    overrides = words.split()
    message = refused(*job, *overrides, **options)
    assert re.search(expected, message)
    for hint in hints(message):
        others = options | ({"num_gpus": hint.num_gpus} if hint.num_gpus else {})
        again = refused(*job, *overrides, *hint.overrides, **others)
        assert again == "" or not hint.fits, hint
        assert not any(words in again for words in ("use --gpus", "share", "leaves nothing")), hint
