"""Whole runs on prompts with images."""

import pytest
import torch
from safetensors.torch import load_file

from demo.make_squares import write
from helpers.engines.live import kernels_for
from helpers.models.images import tiny_vision_model
from helpers.oracle.adapters import ATTENTION
from helpers.runs.train import TINY_CONFIG, finish_run, read_metrics

COLOURS = TINY_CONFIG.parent / "learn_colours.yaml"
EP2 = "parallel.expert_parallel_size=2"
RANKS = ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"]
TRAINED = "model.freeze_vision=false"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        # Half of the ranks have no embeddings, and tensor ranks a part of the tokens each.
        ("qwen2_5_vl", RANKS),
        ("qwen3_vl", RANKS),
        ("qwen3_vl_moe", [RANKS[1], "parallel.data_parallel_size=2", EP2]),
        (
            "qwen2_5_vl",
            ["grpo.shared_prompts=true", "grpo.steps_per_generation=2", "grpo.beta=0.1"],
        ),
        # The reference has a tower of its own, as it was read.
        ("qwen2_5_vl", [TRAINED, *RANKS, "grpo.steps_per_generation=2", "grpo.beta=0.1"]),
        # Requests that pushes cut go on with their images.
        (
            "qwen3_vl",
            [
                "rollout.max_staleness=2",
                "rollout.in_flight_updates=true",
                "grpo.rollout_importance_sampling_mode=token_truncate",
            ],
        ),
    ],
    ids=["ranks", "ranks of Qwen3-VL", "experts", "shared", "trained", "in flight"],
)
def test_engines_and_ranks_agree_and_what_is_trained_changes(tmp_path, family, overrides):
    pytest.importorskip("torchvision", reason="vLLM's multimodal models need it")
    model, rows = tiny_vision_model(tmp_path / "model", family), write(tmp_path / "squares")
    if TRAINED in overrides:  # engines see the same images after each push
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:12]))
    with kernels_for(model):
        ended = finish_run(
            *(f"model.path={model}", f"data.path={rows}", f"train.run_dir={tmp_path / 'run'}"),
            *(
                "train.num_steps=4",
                "eval.data.shuffle=false",
                "eval.max_prompts=6",
                "eval.interval=2",
            ),
            *overrides,
            config=COLOURS,
        )
    assert ended.exit_code == 0, ended.output
    steps = read_metrics(tmp_path / "run")
    assert steps[1]["probe/logprob_gap_max"] < 1e-4  # behind an evaluation before the first
    assert any("eval/mean@1" in step for step in steps)
    if TRAINED in overrides:
        assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in steps if step["step"])
    old, new = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "hf")
    )
    assert old.keys() == new.keys()
    for name, values in old.items():
        is_frozen = "visual." in name and TRAINED not in overrides
        assert torch.equal(values, new[name]) == is_frozen, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_vl", ["lora.sync=adapter", *RANKS]),
        ("qwen3_vl_moe", ["lora.sync=merged", ATTENTION]),
    ],
)
def test_engines_follow_adapters_of_the_text_tower(tmp_path, family, overrides):
    pytest.importorskip("torchvision", reason="vLLM's multimodal models need it")
    model, rows = tiny_vision_model(tmp_path / "model", family), write(tmp_path / "squares")
    with kernels_for(model):
        ended = finish_run(
            *(f"model.path={model}", f"data.path={rows}", f"train.run_dir={tmp_path / 'run'}"),
            *("train.num_steps=4", "lora.r=4", "optimizer.lr=1e-2", "grpo.beta=0.1"),
            *overrides,
            config=COLOURS,
        )
    assert ended.exit_code == 0, ended.output
    steps = read_metrics(tmp_path / "run")
    assert steps[-1]["kl"] > 1e-3  # from the model without adapters
    assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], [TRAINED, "optimizer.optimizer=muon"]], ids=str)
def test_a_run_in_bfloat16_that_is_resumed_ends_like_a_whole_one(tmp_path, overrides):
    pytest.importorskip("torchvision", reason="vLLM's multimodal models need it")
    model = tiny_vision_model(tmp_path / "model", "qwen3_vl")
    paths = f"model.path={model}", f"data.path={write(tmp_path / 'squares')}"
    for name, num_steps in (("whole", 4), ("resumed", 2), ("resumed", 4)):
        run = f"train.run_dir={tmp_path / name}"
        options = run, f"train.num_steps={num_steps}", "model.dtype=bfloat16"
        ended = finish_run(*paths, *options, *overrides, config=COLOURS)
        assert ended.exit_code == 0, ended.output
    whole, resumed = (
        load_file(tmp_path / x / "hf/model.safetensors") for x in ("whole", "resumed")
    )
    assert all(torch.equal(values, resumed[name]) for name, values in whole.items())
    for metrics in read_metrics(tmp_path / "whole"):
        assert metrics["rollout/logprob_gap_mean"] < 0.05
