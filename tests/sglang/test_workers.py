"""Parameters that SGLang loads into each worker of an engine with groups, against pushed ones."""

import json
import os
import subprocess
from collections.abc import Iterable

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.families import FAMILIES
from helpers.engines.live import PACKAGES, SGLANG_PYTHON, worker_sums
from helpers.models.tiny import servable_model
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engine_weights.layouts import worker_layouts
from megatron_grpo.engines.arguments import command_flags
from megatron_grpo.engines.sglang.args import NEEDED, sglang_command, sglang_environment

SIZES = [(1, 2, 1), (1, 2, 2), (2, 1, 2)]
"""Workers of a group, groups, and workers that share whole experts."""
WITHOUT_BROADCASTS = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}
"""Without it a worker waits for the others, to share memory with them."""


def comparable(names: Iterable[str]) -> list[str]:
    """Names without sinks and weights of indexers' heads, which SGLang keeps in bfloat16."""
    return [name for name in names if not name.endswith((".sinks", ".indexer.weights_proj.weight"))]


@pytest.mark.slow
def test_every_worker_of_a_group_loads_the_part_that_is_pushed_to_it(tmp_path):
    cases, wanted = [], []
    tried = (each for each in FAMILIES.values() if each.engines.sglang.was_tried_in_groups)
    for family in (each.model_type for each in tried):
        sizes = {"moe_intermediate_size": 128} if family != "gpt_oss" else {}
        folder = servable_model(tmp_path / family, family, intermediate_size=128, **sizes)
        for tensor, data, expert in SIZES:
            if family == "gpt_oss" and expert > 1:
                continue  # refused
            rollout = RolloutConfig(
                engine="sglang",
                max_completion_length=16,
                tensor_parallel_size=tensor,
                data_parallel_size=data,
                sglang={"ep_size": expert},
            )
            model = ModelConfig(path=folder, dtype="float32")
            command = sglang_command(model, rollout, "127.0.0.1", 1, False)
            cases.append(([*command[4:], *command_flags(NEEDED)], tensor * data))
            shapes = [each.shapes for each in worker_layouts(read_shape(folder), rollout)]
            for shape, sums in zip(shapes, worker_sums(folder, rollout), strict=True):
                wanted.append({name: [[*shape[name]], sums[name]] for name in comparable(shape)})
    (given := tmp_path / "cases.json").write_text(json.dumps(cases))
    environment = sglang_environment(model, rollout, on_gpu=False) | WITHOUT_BROADCASTS
    subprocess.run(
        [SGLANG_PYTHON, "-P", "-m", "helpers.engines.sglang_workers", given, tmp_path / "out.json"],
        env=os.environ | environment | {"PYTHONPATH": PACKAGES, "ENGINE_POSES": "unkernelled"},
        check=True,
        timeout=250,
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert [{name: each[name] for name in comparable(each)} for each in found] == wanted
