"""An export is a complete model with finite weights, or nothing is exported."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_convert import read_shape
from helpers.models.tiny import add_mtp_layer, tiny_model
from helpers.oracle.policies import start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.file import dump_config
from megatron_grpo.policy.export import export_model, keep_export
from parallel import ParallelDims

ONE = ParallelDims()
CASES = {
    "qwen3": ParallelDims(tensor=2, data=2),
    "qwen3_moe": ParallelDims(tensor=2, pipeline=2, data=2, expert=2),
    "gpt_oss": ParallelDims(tensor=2, pipeline=2, expert=2, expert_tensor=1),
    "glm4_moe": ParallelDims(tensor=2, data=2),
}


def export_and_spoil(rank: int, folder: Path, dims: ParallelDims, out: Path) -> list[str]:
    """Export a complete policy, one with a NaN on rank 1, and one that lacks a part on rank 1."""
    policy, groups = start_policy(rank, folder, dims)
    cfg = tiny_config(folder, dims)
    export_model(out / "whole", policy, cfg, groups)
    errors = []
    last = list(policy.parameters().values())[-1].data.view(-1)
    kept = last[0].clone()
    if rank == 1:
        last[0] = torch.nan
    with pytest.raises(FloatingPointError) as error:
        export_model(out / "spoilt", policy, cfg, groups)
    errors.append(str(error.value))
    last[0] = kept
    if rank == 1:
        pieces = [piece for piece in policy.layout.pieces if not piece.is_replica]
        policy.layout = replace(policy.layout, pieces=tuple(pieces[1:]))
    try:
        export_model(out / "short", policy, cfg, groups)
    except AssertionError as error:
        errors.append(str(error))
    return errors


@pytest.mark.parametrize("family", CASES)
def test_a_model_is_exported_whole_and_finite_or_not_at_all(family: str, tmp_path: Path) -> None:
    """With copies of parameters, a layout of experts, or an untrained layer for multi-token
    prediction."""
    folder, out, dims = tmp_path / "model", tmp_path / "out", CASES[family]
    tiny_model(folder, family, tied=family == "qwen3")
    if family == "glm4_moe":
        add_mtp_layer(folder)
    out.mkdir()
    by_rank = run_ranks(dims.world_size, export_and_spoil, folder, dims, out)
    assert [path.name for path in sorted(out.iterdir())] == ["short.partial", "whole"]
    theirs, ours = (load_file(at / "model.safetensors") for at in (folder, out / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs | ours)
    assert all("is not finite: nothing is exported" in errors[0] for errors in by_rank)
    assert by_rank[0][0].startswith("rank 1: ")
    assert [len(errors) for errors in by_rank] == [2] + [1] * (dims.world_size - 1)
    assert "elements were written" in by_rank[0][1]


def export_on_rank(rank: int, folder: Path, out: Path, *overrides: str) -> None:
    policy, groups = start_policy(rank, folder, ONE, *overrides)
    export_model(out, policy, tiny_config(folder, ONE, *overrides), groups)


def test_an_exported_model_ends_with_the_stop_tokens_that_it_was_trained_with(
    tmp_path: Path,
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    tiny_model(folder, "qwen3")
    before = read_shape(folder).eos_token_ids
    run_ranks(1, export_on_rank, folder, out, "rollout.stop_token_ids=[7]")
    assert read_shape(out).eos_token_ids == (*before, 7)
    run_ranks(1, export_on_rank, folder, out)
    assert read_shape(out) == read_shape(folder)


@pytest.mark.parametrize(
    ("ended", "step", "is_stopped", "interval", "exports"),
    [
        (4, 4, False, 2, {"hf_step_2", "hf_step_4"}),
        (4, 4, False, None, {"hf_step_2", "hf"}),
        (4, 4, False, 3, {"hf_step_2", "hf"}),
        (8, 4, True, 2, {"hf_step_2", "hf_step_4"}),  # a hook has ended the run
        (8, 4, False, 2, {"hf_step_2", "hf"}),  # back to an earlier checkpoint: `hf` is of step 8
    ],
)
def test_the_last_export_of_a_run_that_is_extended_stays_if_it_is_on_the_interval(
    ended: int,
    step: int,
    is_stopped: bool,
    interval: int | None,
    exports: set[str],
    tmp_path: Path,
) -> None:
    options = (f"train.run_dir={tmp_path}", f"train.num_steps={ended}")
    (tmp_path / "config.yaml").write_text(dump_config(tiny_config(tmp_path, ONE, *options)))
    for name in ("hf_step_2", "hf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "made_as").write_text(name)
    every = () if interval is None else (f"train.export_interval={interval}",)
    longer = tiny_config(tmp_path, ONE, options[0], "train.num_steps=9", *every)
    keep_export(longer, step, is_stopped=is_stopped)
    keep_export(longer, step, is_stopped=is_stopped)  # a killed start is repeated
    assert {path.name for path in tmp_path.glob("hf*")} == exports
    assert (tmp_path / max(exports - {"hf_step_2"}) / "made_as").read_text() == "hf"
