"""Whole runs on prompts with images."""

import pytest
import torch
from safetensors.torch import load_file

from demo.make_squares import write
from helpers.images import tiny_vision_model
from helpers.runs import TINY_CONFIG, finish_run, read_metrics

COLOURS = TINY_CONFIG.parent / "learn_colours.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        # Half of the ranks have no embeddings, and tensor ranks a part of the tokens each.
        ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"],
        ["grpo.shared_prompts=true", "grpo.steps_per_generation=2", "grpo.beta=0.1"],
        # Requests that pushes cut go on with their images.
        [
            "rollout.max_staleness=2",
            "rollout.in_flight_updates=true",
            "grpo.rollout_importance_sampling_mode=token_truncate",
        ],
    ],
    ids=["ranks", "shared", "in flight"],
)
def test_engines_and_ranks_agree_and_only_the_text_tower_changes(tmp_path, overrides):
    model, rows = tiny_vision_model(tmp_path / "model"), write(tmp_path / "squares")
    ended = finish_run(
        *(f"model.path={model}", f"data.path={rows}", f"train.run_dir={tmp_path / 'run'}"),
        *("train.num_steps=4", "eval.data.shuffle=false", "eval.max_prompts=6", "eval.interval=2"),
        *overrides,
        config=COLOURS,
    )
    assert ended.exit_code == 0, ended.output
    steps = read_metrics(tmp_path / "run")
    assert steps[1]["probe/logprob_gap_max"] < 1e-4  # behind an evaluation before the first
    assert any("eval/mean@1" in step for step in steps)
    old, new = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "hf")
    )
    assert old.keys() == new.keys()
    for name, values in old.items():
        assert torch.equal(values, new[name]) == ("visual." in name), name
