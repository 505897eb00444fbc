"""Training state leaves its device while engines use it, and comes back.

On CPUs state that leaves is freed and restored as on a GPU; tests/gpu measures a GPU's memory.
"""

from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from helpers.models.tiny import add_mtp_layer, tiny_model
from helpers.oracle.optimizers import allow_offload
from helpers.oracle.policies import (
    LENGTHS,
    pack_all,
    start_policy,
    tiny_config,
)
from helpers.oracle.rows import OVERLAP
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import (
    PARTS,
    Offload,
    Phase,
    communicates,
    parts_away,
    parts_copied,
    parts_moved,
    parts_used,
)
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning.state import part_bytes, state_bytes
from megatron_grpo.policy import residency as residency_module
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.reference import reference_of
from megatron_grpo.policy.residency import Residency, build_residency, state_of
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims
from parallel.groups import Groups

CPU = torch.device("cpu")
PHASES: tuple[Phase, ...] = ("train", "push", "generate", "log-probabilities")
"""In the order of a run."""
FOLLOWS = ("grpo.beta=0.04", "grpo.sync_ref_model=true", "grpo.ref_model_sync_steps=1")
MTP = "model.mtp_num_layers=1"
ADAPTERS = "lora.r=64"  # half as many elements as the layers have
ON_HOST = "optimizer.optimizer_cpu_offload=true"
LAYOUTS = [
    pytest.param("qwen3", ParallelDims(data=2), "bfloat16", (), marks=pytest.mark.slow),
    ("qwen3_moe", ParallelDims(expert=2, data=2), "float32", ()),
    ("qwen3", ParallelDims(data=2), "bfloat16", (ADAPTERS,)),
    pytest.param(
        *("llama", ParallelDims(tensor=2), "float32", (ADAPTERS,)), marks=pytest.mark.slow
    ),
    ("qwen3", ParallelDims(tensor=2), "bfloat16", (ON_HOST,)),
    ("glm4_moe", ParallelDims(pipeline=2), "bfloat16", (MTP,)),
    pytest.param(
        *("glm4_moe", ParallelDims(expert=2, data=2), "float32", (MTP,)), marks=pytest.mark.slow
    ),
]


def test_parts_that_a_phase_uses_are_on_the_gpu() -> None:
    lists: tuple[Offload, ...] = (("weights",), ("reference", "gradients"))
    for phase in PHASES:
        for offload in ("none", "optimizer", "all", *lists):
            assert not {*parts_used(phase)} & {*parts_away(offload, phase)}
        # Communicators come back with the weights, for which engines have made room.
        assert communicates(phase) or "weights" in parts_away(("weights",), phase)
    assert parts_away("all", "generate") == PARTS and not communicates("generate")
    assert parts_moved(("optimizer",)) == parts_moved("optimizer") == ("gradients", "optimizer")
    assert parts_moved(("optimizer", "weights", "reference")) == PARTS
    assert parts_moved(()) == ()


def config(folder: Path, dims: ParallelDims, dtype: str, offload: str, *also: str) -> Config:
    options = (f"model.dtype={dtype}", f"train.offload={offload}", *FOLLOWS, *also)
    return tiny_config(folder, dims, *options, "rollout.enable_sleep_mode=true")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages now."""
    return sum(storage.nbytes() for storage in {each.untyped_storage() for each in tensors})


def spoil_gradients(policy: Policy) -> None:
    """Fill gradients with NaN: memory that was freed and allocated again may hold anything."""
    for gradient in state_of(policy, None)["gradients"]:
        gradient.fill_(torch.nan)


def step(policy: Policy, groups: Groups, cfg: Config) -> None:
    share = pack_all(LENGTHS, groups.dims)[groups.coordinates.data :: groups.dims.data]
    cfg = cfg.model_copy(update={"grpo": cfg.grpo.model_copy(update={"beta": 0.0})})
    function = LossFunction.of(cfg.grpo, CPU)
    train_step(policy, share, cfg, groups, function, SkippedSteps(1), beta=0.0)


def go_through_two_generations(
    rank: int,
    folder: Path,
    dims: ParallelDims,
    dtype: str,
    offload: str,
    also: tuple[str, ...],
    run: Path,
) -> tuple[dict[str, int], list[Tensor]]:
    """Bytes on the device by phase and on the host, and log-probabilities; saves and exports.

    It saves and exports in the phase in which most is away.
    """
    if ON_HOST in also:
        allow_offload()
    policy, groups = start_policy(rank, folder, dims, f"model.dtype={dtype}", *also)
    cfg = config(folder, dims, dtype, offload, *also)
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"run_dir": run})})
    reference = reference_of(policy, cfg, groups)
    residency = build_residency(cfg, policy, reference, CPU, num_ranks=2)
    checkpoints = Checkpoints(cfg, policy, reference, residency)
    copies = [room.host for room in residency.rooms if room.host is not None]
    found, logprobs = {"host": bytes_of(copies)}, []
    for number in (1, 2):
        for phase in PHASES:
            residency.enter(phase)
            state = state_of(policy, reference)
            found[phase] = bytes_of(each for part in PARTS for each in state[part])
            if phase == "train":
                spoil_gradients(policy)
                step(policy, groups, cfg)
                reference.follow(policy, number)
                residency.copy_ahead("push")
            elif phase == "push":
                residency.copy_ahead("generate")
            elif phase == "generate":
                checkpoints.save(TrainerState(step=number), {})
                export_model(run / f"hf_{number}", policy, cfg, groups, residency)
            elif phase == "log-probabilities":
                for model in (policy, reference):
                    computed = compute_logprobs(model, pack_all(LENGTHS, dims), 1.0, groups)
                    logprobs += [values for values, _ in computed]
        checkpoints.wait()
    return found, logprobs


def files_of(run: Path) -> dict[str, bytes]:
    """Files of weights and state that a run has written."""
    kinds = (".safetensors", ".distcp", ".metadata")
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.name.endswith(kinds)
    }


@pytest.mark.long
@pytest.mark.parametrize(("family", "dims", "dtype", "also"), LAYOUTS, ids=str)
def test_offloading_changes_no_bit_and_holds_the_planned_bytes(
    family: str, dims: ParallelDims, dtype: str, also: tuple[str, ...], tmp_path: Path
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512}  # so that padding is less than 5 %
    folder = tiny_model(tmp_path / "model", family, **wide)
    if MTP in also:
        add_mtp_layer(folder, norm=1.0)
    runs = {}
    for offload in ("none", "optimizer", "all", "[weights]"):
        run = tmp_path / offload
        arguments = (folder, dims, dtype, offload, also, run)
        runs[offload] = run_ranks(2, go_through_two_generations, *arguments)
        assert len(files_of(run)) >= 2 * (2 + 1 + 1)
        assert files_of(run) == files_of(tmp_path / "none")
        assert any(logprobs for _, logprobs in runs[offload])  # the last stage has them
        for rank, (found, logprobs) in enumerate(runs[offload]):
            assert all(map(torch.equal, logprobs, runs["none"][rank][1]))
            cfg = config(folder, dims, dtype, offload, *also)
            state = state_bytes(cfg, trained_shape(cfg), rank)
            for phase in PHASES:
                planned = state.total - part_bytes(state, parts_away(cfg.offload, phase))
                assert found[phase] == pytest.approx(planned, rel=0.05), (offload, phase)
            planned = part_bytes(state, parts_copied(cfg.offload))
            assert found["host"] == pytest.approx(planned, rel=0.05), offload


def change_and_come_back(rank: int, folder: Path) -> list[bool]:
    policy, _ = start_policy(rank, folder, ParallelDims())
    cfg = config(folder, ParallelDims(), "float32", "all")
    residency = build_residency(cfg, policy, None, CPU, num_ranks=1)
    [first, *_] = policy.parameters().values()
    corner = first[1:3, :4]  # torch cannot slice a tensor that is away
    residency.enter("push")
    assert residency.readable(first) is first
    residency.enter("generate")
    copy = residency.readable(corner)
    residency.enter("train")
    same = torch.equal(copy, corner) and copy is not corner
    first.data[1, 0] += 1.0
    moved = first.detach().clone()
    residency.enter("generate")
    residency.enter("train")
    return [same, torch.equal(first, moved)]


def test_a_copy_is_readable_while_its_tensor_is_away_and_is_made_anew_in_each_move(
    tied_model: Path,
) -> None:
    assert run_ranks(1, change_and_come_back, tied_model) == [[True, True]]


def change_after_the_copy(rank: int, folder: Path, also: tuple[str, ...]) -> list[bool]:
    """Whether all parts come back as they were when copied, after each of two steps."""
    policy, groups = start_policy(rank, folder, ParallelDims(), *also)
    cfg = config(folder, ParallelDims(), "float32", "all", *also)
    cfg = cfg.model_copy(update={"grpo": cfg.grpo.model_copy(update={"sync_ref_model": False})})
    reference = reference_of(policy, cfg, groups)
    residency = build_residency(cfg, policy, reference, CPU, num_ranks=1)
    found = []
    for _ in range(2):
        residency.enter("train")
        step(policy, groups, cfg)
        before = {room: room.values.clone() for room in residency.rooms if room.host is not None}
        if found:  # no step changes the reference's weights, which adapters share: copied once
            for values in reference.parameters().values():
                values.detach().fill_(torch.nan)
        residency.copy_ahead("push")
        overwrite(residency, "reference", "optimizer")
        residency.enter("push")
        residency.copy_ahead("generate")
        overwrite(residency, "weights")
        residency.enter("generate")
        residency.enter("train")
        found.append(all(torch.equal(room.values, before[room]) for room in before))
    return found


def overwrite(residency: Residency, *parts: str) -> None:
    for room in residency.rooms:
        if room.part in parts:
            room.values.fill_(255)


@pytest.mark.parametrize("also", [(), (ADAPTERS,)], ids=str)
def test_a_part_copied_ahead_comes_back_as_copied_and_is_copied_anew_after_a_step(
    tied_model: Path, also: tuple[str, ...]
) -> None:
    assert run_ranks(1, change_after_the_copy, tied_model, also) == [[True, True]]


def make_room_for_an_engine(rank: int, folder: Path, offload: str) -> list[Tensor]:
    """Weights of a step after a push, before which they have left for an engine that starts."""
    dims = ParallelDims(data=2)
    policy, groups = start_policy(rank, folder, dims, *OVERLAP)
    cfg = config(folder, dims, "float32", offload, *OVERLAP)
    residency = build_residency(cfg, policy, None, CPU, num_ranks=2)
    residency.enter("train")
    step(policy, groups, cfg)
    phases: tuple[Phase, ...] = ("generate", "push", "generate", "train")
    for phase in phases:
        residency.enter(phase)
        if phase == "push":
            policy.parameters()
    return [each.detach() for each in policy.parameters().values()]


def test_weights_that_leave_right_after_a_step_are_whole(tied_model: Path) -> None:
    stayed, left = (
        run_ranks(2, make_room_for_an_engine, tied_model, offload) for offload in ("none", "all")
    )
    for expected, found in zip(stayed, left, strict=True):
        assert all(map(torch.equal, found, expected))


def communicators_away(rank: int, folder: Path, phases: list[Phase]) -> list[bool]:
    policy, _ = start_policy(rank, folder, ParallelDims(data=2))
    cfg = config(folder, ParallelDims(data=2), "float32", "[weights]")
    train = cfg.train.model_copy(update={"offload_communicators": True})
    cfg = cfg.model_copy(update={"train": train})
    residency = build_residency(cfg, policy, None, CPU, num_ranks=2)
    assert residency.communicators is not None
    are_away = []
    for phase in phases:
        residency.enter(phase)
        are_away.append(residency.communicators.are_away)
    return are_away


def test_communicators_are_away_only_while_engines_generate(tied_model: Path) -> None:
    phases = ["push", "generate", "generate", "push", "generate", "log-probabilities", "train"]
    expected = [phase == "generate" for phase in phases]
    assert run_ranks(2, communicators_away, tied_model, phases) == [expected] * 2


def lack_memory(rank: int, folder: Path) -> str:
    policy, _ = start_policy(rank, folder, ParallelDims(data=2))
    cfg = config(folder, ParallelDims(data=2), "float32", "all")
    free = 10_000 if rank == 1 else 10**12
    with (
        patch.object(residency_module, "available_bytes", lambda: free),
        pytest.raises(ValueError) as refused,
    ):
        build_residency(cfg, policy, None, CPU, num_ranks=2)
    return str(refused.value)


def test_a_host_without_the_memory_is_named_at_the_start_on_all_ranks(tied_model: Path) -> None:
    first, second = run_ranks(2, lack_memory, tied_model)
    assert first == f"rank 1: {second}"
    assert second.startswith("train.offload all needs 0.0 GB of host memory for the state of 2")
    assert "set train.offload to optimizer or none" in second


@pytest.mark.parametrize("offload", ["none", "all"])
def test_nothing_is_moved_without_the_key_or_without_engines(
    tied_model: Path, offload: str
) -> None:
    cfg = config(tied_model, ParallelDims(), "float32", offload)
    if offload != "none":
        replayed = cfg.train.model_copy(update={"replay": Path("another_run")})
        cfg = cfg.model_copy(update={"train": replayed})
    stays: Residency = build_residency(cfg, None, None, CPU, num_ranks=1)  # type: ignore[arg-type]
    stays.enter("generate")
    assert stays.away == ()
