"""Checkpoints of real ranks: a load gives what was saved, and only a complete one counts."""

import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from checkpoint_convert.formats.torch_dist import read_chunks, read_object_places
from checkpoint_convert.formats.torch_dist_writer import CreatedChunk, index_of
from helpers.models.conversions import file_size_limit
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    accumulate,
    checkpoints_of,
    pack_all,
    save_checkpoint,
    start_policy,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints import checkpointer as checkpoints_module
from megatron_grpo.checkpoints import folders, manifest, shard_file
from megatron_grpo.checkpoints import state as megatron_state
from megatron_grpo.checkpoints.newest import screen_checkpoint, steps_done
from megatron_grpo.checkpoints.shard_file import HostMemory
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.policy.model import Policy, unwrapped
from parallel import ParallelDims
from parallel.groups import Groups

DIMS = ParallelDims(tensor=2, pipeline=2)
SECRET = "nobody-is-to-read-this"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def step(policy: Policy, groups: Groups) -> None:
    share = pack_all(LENGTHS, groups.dims)[groups.coordinates.data :: groups.dims.data]
    accumulate(policy, groups, share)
    policy.optimizer.step()
    policy.scheduler.step(increment=1)


def state_of(policy: Policy) -> list[torch.Tensor]:
    """Copies of this rank's weights, master weights, moments and step counts."""
    optimizer = [
        tensor.clone()
        for part in policy.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter.detach(), *part.optimizer.state[parameter].values())
    ]
    return [tensor.detach().clone() for tensor in policy.parameters().values()] + optimizer


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def save_while_training(rank: int, model: Path, run: Path) -> list[list[torch.Tensor]]:
    """The state at the save, and after a step that is taken during the save."""
    policy, groups = start_policy(rank, model, DIMS)
    step(policy, groups)
    step(policy, groups)
    states = [state_of(policy)]
    torch.manual_seed(rank)
    states.append([torch.rand(3)])
    torch.manual_seed(rank)
    os.environ["WANDB_API_KEY"] = os.environ["MEGATRON_GRPO_TOKEN"] = SECRET
    checkpoints = checkpoints_of(run, policy, model, DIMS)
    checkpoints.save(TrainerState(step=2, num_skipped_in_a_row=1, wandb_id="abc"), {})
    assert not (run / "checkpoints" / "step_2").exists(), "the save did not wait for anybody"
    assert psutil.Process().children() == [], "a process could outlive its rank"
    step(policy, groups)
    states.append(state_of(policy))
    is_there = torch.zeros(())
    while not is_there:
        time.sleep(0.01)
        checkpoints.poll()
        is_there.fill_((run / "checkpoints" / "step_2").exists())
        dist.all_reduce(is_there, dist.ReduceOp.MIN)  # no rank stops while another goes on
    return states


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A run directory with one checkpoint, and the states of its four ranks."""
    run = tmp_path_factory.mktemp("run")
    return run, run_ranks(4, save_while_training, model, run)


def load_and_train(policy: Policy, groups: Groups, model: Path, run: Path) -> Any:
    state = checkpoints_of(run, policy, model, DIMS).load()
    assert state == TrainerState(step=2, num_skipped_in_a_row=1, wandb_id="abc")
    states = [state_of(policy), [torch.rand(3)]]
    step(policy, groups)
    return [*states, state_of(policy)]


def four_ranks(
    rank: int, model: Path, run: Path, died: Path, evil: Path, runs: Path
) -> tuple[Any, dict[str, str]]:
    """States of a resumed run, and the error message of each failure, in a run of its own."""
    policy, groups = start_policy(rank, model, DIMS)
    resumed, said = load_and_train(policy, groups, model, run), {}
    assert checkpoints_of(died, policy, model, DIMS).load().step == 1
    said[EVIL] = load_nothing(evil, policy, model)
    with pytest.MonkeyPatch.context() as patch:
        said[NO_ROOM] = save_without_room(runs / NO_ROOM, policy, model, patch)
    for place in NOT_FINITE:
        said[place] = save_what_is_not_finite(runs / place, policy, model, place)
    no = mock.Mock(side_effect=PermissionError(1, "Operation not permitted"))
    with mock.patch.object(folders, "publish", no), pytest.raises(OSError) as raised:
        save_checkpoint(runs / NOT_PUBLISHED, 1, policy, model, DIMS)
    said[NOT_PUBLISHED] = str(raised.value)
    said[FULL_DISK] = save_onto_a_full_disk(runs / FULL_DISK, policy, model, groups)
    return resumed, said


FULL_DISK, NO_ROOM, NOT_PUBLISHED, EVIL = "full disk", "no room", "not published", "evil"
NOT_FINITE = ("decoder", "optimizer.state.exp_avg_sq")


@pytest.fixture(scope="module")
def four(saved, died, model, tmp_path_factory):
    """(folder of runs that could not save, run with malicious files, each rank's states and
    messages)."""
    runs, evil = tmp_path_factory.mktemp("failed"), tmp_path_factory.mktemp("evil")
    newest = shutil.copytree(saved[0] / "checkpoints", evil / "checkpoints") / "step_2"
    torch.save({"args": Bomb(evil / "made")}, newest / "common.pt")
    manifest.write_manifest(newest, manifest.hash_files(newest, manifest.read_manifest(newest)))
    ranks = run_ranks(4, four_ranks, model, saved[0], died, evil, runs)
    return runs, evil, *zip(*ranks, strict=True)


def test_load_is_bit_for_bit_what_was_saved_and_so_is_the_next_step(saved, four):
    for ours, theirs in zip(four[2], saved[1], strict=True):
        for part, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert same(a, b), ("state", "random numbers", "state after a step")[part]


def load_and_save(rank: int, model: Path, run: Path, dims: ParallelDims, again: Path) -> None:
    shard_file.MAX_CHUNK_BYTES = 1000  # this process only: tensors get several chunks
    policy, _ = start_policy(rank, model, dims)
    state = checkpoints_of(run, policy, model, dims).load()
    save_checkpoint(again, state.step, policy, model, dims)


def test_load_at_another_layout_has_the_same_bits(saved, model, tmp_path):
    """Each layout loads the checkpoint of the layout before."""
    run, before = saved
    others = [ParallelDims(data=2), ParallelDims(tensor=4), ParallelDims(context=2, pipeline=2)]
    for dims in others:
        there = tmp_path / str(dims)
        run_ranks(dims.world_size, load_and_save, model, run, dims, there)
        run = there
    pieces = read_chunks(run / "checkpoints" / "step_2").layout.pieces
    assert max(piece.box.num_elements for piece in pieces) <= 1000 // 4
    after = run_ranks(4, load_state, model, run)
    for ours, theirs in zip(after, before, strict=True):
        assert same(ours, theirs[0])


OWN_SCHEDULE = ("optimizer.lr=5e-4", "optimizer.lr_warmup_steps=2", "train.num_steps=9")


def start_from(rank: int, model: Path, runs: Path, sources: list[Path]) -> list[Any]:
    """For each source: the state of a new run with other settings at its start, after a step, and
    when it resumes."""
    policy, groups = start_policy(rank, model, DIMS, *OWN_SCHEDULE)
    states = []
    for number, source in enumerate(sources):
        fresh, run = schedule_of(policy), runs / str(number)
        options = (*OWN_SCHEDULE, f"train.init_from={source}")
        checkpoints = checkpoints_of(run, policy, model, DIMS, *options)
        assert checkpoints.load() == TrainerState(step=0)
        assert schedule_of(policy) == fresh
        states.append([state_of(policy)])
        step(policy, groups)
        step(policy, groups)
        states[-1].append(state_of(policy))
        checkpoints.save(TrainerState(step=2), {})
        checkpoints.wait()
        step(policy, groups)
        gone = (*OWN_SCHEDULE, "train.init_from=gone")
        assert checkpoints_of(run, policy, model, DIMS, *gone).load().step == 2
        states[-1].append(state_of(policy))
    return states


@pytest.mark.long
def test_init_from_starts_at_step_0_from_a_run_or_checkpoint(saved, model, tmp_path):
    run, before = saved
    after = run_ranks(4, start_from, model, tmp_path, [run, run / "checkpoints" / "step_2"])
    for rank, theirs in zip(after, before, strict=True):
        for start, trained, resumed in rank:
            assert same(start, theirs[0])
            assert not same(trained, start)
            assert same(resumed, trained), "init_from is read once"


# On two data ranks.

PAIR = ParallelDims(data=2)


def two_ranks(rank: int, model: Path, run: Path, damaged: Path, runs: Path) -> dict[str, Any]:
    policy, groups = start_policy(rank, model, PAIR)
    found = {"past damage": load_past_damage(policy, groups, model, runs / "past damage")}
    with pytest.raises(ValueError) as refused:
        option = f"train.init_from={damaged}"
        checkpoints_of(runs / "new", policy, model, PAIR, option).load()
    return found | {
        "from damaged": str(refused.value),
        "by megatron": load_by_megatron(policy, model, run),
        "indexes": save_four_and_keep_three(policy, model, runs / "indexes"),
        "descriptors": load_without_descriptors(policy, model, runs / "descriptors"),
    }


@pytest.fixture(scope="module")
def two(saved, model, tmp_path_factory):
    """(folder of runs, a damaged checkpoint, results of the two ranks)."""
    runs = tmp_path_factory.mktemp("two")
    damaged = runs / "step_2"
    (runs / "step_1").mkdir()
    shutil.copytree(saved[0] / "checkpoints" / "step_2", damaged)
    flip_a_bit(damaged / "__1_0.distcp")
    return runs, damaged, run_ranks(2, two_ranks, model, saved[0], damaged, runs)


def test_init_from_a_damaged_checkpoint_is_refused(two):
    runs, damaged, ranks = two
    for said in (rank["from damaged"] for rank in ranks):
        assert f"train.init_from {damaged} cannot be used: " in said
        assert "__1_0.distcp is damaged" in said
        assert f"; set train.init_from to another checkpoint, such as {runs / 'step_1'}," in said


METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


def load_by_megatron(policy: Policy, model: Path, run: Path) -> list[str]:
    """Names of tensors that Megatron-Core's own loader reads differently."""
    from megatron.core import dist_checkpointing

    def sharded(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
        chunk = unwrapped(policy.chunks[0]).sharded_state_dict(metadata=METADATA)
        states = policy.optimizer.sharded_state_dict(
            {"model0": chunk}, is_loading=is_loading, metadata=METADATA
        )["param_state"]
        return chunk | {
            f"{number} {name}": state
            for number, by_name in states.items()
            for name, state in by_name.items()
        }

    state = sharded(policy, is_loading=True)
    theirs = dist_checkpointing.load(state, str(run / "checkpoints" / "step_2"))
    theirs = {k: v.clone() for k, v in theirs.items() if isinstance(v, torch.Tensor)}
    checkpoints_of(run, policy, model, PAIR).load()
    ours = {k: v.data for k, v in sharded(policy, is_loading=False).items() if v.data is not None}
    assert theirs.keys() == ours.keys()
    assert len(ours) == 4 * len(policy.parameters())
    return [name for name, values in ours.items() if not torch.equal(values, theirs[name])]


def test_load_gives_the_values_of_megatron_cores_loader(two):
    assert [rank["by megatron"] for rank in two[2]] == [[], []]


def load_state(rank: int, model: Path, run: Path) -> list[torch.Tensor]:
    policy, _ = start_policy(rank, model, DIMS)
    checkpoints_of(run, policy, model, DIMS).load()
    return state_of(policy)


def test_save_records_layout_and_versions_and_no_secret(saved):
    folder = saved[0] / "checkpoints" / "step_2"
    record = json.loads((folder / "trainer.json").read_text())
    assert record["layout"]["tensor"] == record["layout"]["pipeline"] == 2
    assert record["versions"]["torch"] == version("torch")
    files = [path for path in saved[0].rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    listed = json.loads((folder / "manifest.json").read_text())["files"].keys()
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == {*listed, "manifest.json"}
    assert {"config.yaml", "hf_config/config.json", "common.pt", ".metadata"} <= listed


def save_four_and_keep_three(policy: Policy, model: Path, run: Path) -> list[int]:
    """The number of chunks of each index that was built."""
    lengths = []

    def counted(placed: Sequence[CreatedChunk], objects: Sequence[str]) -> bytes:
        lengths.append(len(placed))
        return index_of(placed, objects)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_module, "index_of", counted)
        checkpoints = checkpoints_of(run, policy, model, PAIR, "train.keep_checkpoints=3")
        for number in range(1, 5):
            checkpoints.save(TrainerState(step=number), {})
        checkpoints.wait()
    return lengths


def test_save_keeps_the_configured_number_with_one_index(two):
    folder = two[0] / "indexes" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"step_2", "step_3", "step_4", "LATEST"}
    lengths = [rank["indexes"] for rank in two[2]]
    assert lengths == [[len(read_chunks(folder / "step_4").layout.pieces)], [0]]
    assert len({(folder / f"step_{step}" / ".metadata").read_bytes() for step in (2, 3, 4)}) == 1


def save_without_room(run: Path, policy: Policy, model: Path, patch: pytest.MonkeyPatch) -> str:
    usage = type("Usage", (), {"free": 1000})
    megatron_disk = "megatron_grpo.checkpoints.checkpointer.shutil.disk_usage"
    patch.setattr(megatron_disk, lambda folder: usage)
    with pytest.raises(
        OSError, match=r"1,000 bytes free, but a checkpoint takes [\d,]+: make room"
    ):
        checkpoints_of(run, policy, model, DIMS).load()
    with pytest.raises(OSError) as raised:
        save_checkpoint(run, 1, policy, model, DIMS)
    return str(raised.value)


def save_what_is_not_finite(run: Path, policy: Policy, model: Path, place: str) -> str:
    if place == "decoder":
        number = next(iter(policy.parameters().values())).data.view(-1)[-1:]
    else:
        state = next(iter(policy.optimizer.chained_optimizers[0].optimizer.state.values()))
        number = state["exp_avg_sq"].view(-1)[:1]
    finite = number.clone()
    if dist.get_rank() == 3:
        number.fill_(torch.nan if place == "decoder" else torch.inf)
    with pytest.raises(FloatingPointError) as raised:
        save_checkpoint(run, 1, policy, model, DIMS)
    number.copy_(finite)
    return str(raised.value)


def save_onto_a_full_disk(run: Path, policy: Policy, model: Path, groups: Groups) -> str:
    save_checkpoint(run, 1, policy, model, DIMS)
    step(policy, groups)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # A limit on file sizes stands for a full disk, in this process only.
    is_full = file_size_limit(100_000) if groups.rank == 2 else nullcontext()
    with is_full, pytest.raises(OSError) as raised:
        save_checkpoint(run, 2, policy, model, DIMS)
    assert checkpoints_of(run, policy, model, DIMS).load().step == 1
    return str(raised.value)


@pytest.mark.parametrize("place", NOT_FINITE)
def test_save_names_what_is_not_finite(four, place):
    runs, messages = four[0], [said[place] for said in four[3]]
    assert messages[3].startswith(place) and "is not finite: nothing is saved" in messages[3]
    assert messages[:3] == [f"rank 3: {messages[3]}"] * 3
    assert list((runs / place).rglob("step_*")) == []


def test_save_onto_a_disk_that_fills_up_leaves_the_checkpoint_before(four):
    runs, messages = four[0], [said[FULL_DISK] for said in four[3]]
    assert "cannot be written" in messages[2] and ".distcp" in messages[2]
    assert messages[0] == f"rank 2: {messages[2]}"
    assert (runs / FULL_DISK / "checkpoints" / "LATEST").read_text() == "step_1\n"


def test_save_without_room_writes_nothing(four):
    runs, message = four[0], four[3][3][NO_ROOM]
    assert "rank 0: " in message and "1,000 bytes free, but a checkpoint takes" in message
    assert list((runs / NO_ROOM).rglob("step_*")) == []


def test_save_fails_on_all_ranks_if_rank_0_cannot_publish(four):
    first, *others = (said[NOT_PUBLISHED] for said in four[3])
    assert "step_1.partial cannot be written: [Errno 1]" in first
    assert others == [f"rank 0: {first}"] * 3


def die_in_the_save(rank: int, model: Path, run: Path) -> None:
    policy, groups = start_policy(rank, model, DIMS)
    save_checkpoint(run, 1, policy, model, DIMS)
    step(policy, groups)
    if rank == 1:
        write = manifest.write_hashed

        def write_and_die(*args: Any) -> None:
            write(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        manifest.write_hashed = write_and_die
    save_checkpoint(run, 2, policy, model, DIMS)


@pytest.fixture(scope="module")
def died(model, tmp_path_factory):
    """A run in which a rank died during the second save."""
    run = tmp_path_factory.mktemp("died")
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(4, die_in_the_save, model, run)
    assert (run / "checkpoints" / "step_2.partial").exists()
    return run


def test_save_of_a_rank_that_dies_leaves_the_checkpoint_before(died, four):
    assert not (died / "checkpoints" / "step_2.partial").exists(), "loaded in `four_ranks`"


class Bomb:
    """A malicious pickle: loading it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the saved checkpoint in a run directory of its own."""
    return shutil.copytree(saved[0] / "checkpoints", tmp_path / "checkpoints") / "step_2"


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_screen_checkpoint_refuses_what_would_run_code(copied, tmp_path, name):
    made = tmp_path / "made"
    screen_checkpoint(copied)
    if name == "common.pt":
        torch.save({"args": Bomb(made)}, copied / name)
    else:
        (copied / name).write_bytes(pickle.dumps(Bomb(made)))
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*requires"):
        screen_checkpoint(copied)
    assert not made.exists()
    if name == ".metadata":  # the danger: torch would run the code
        pickle.loads((copied / name).read_bytes())
        assert made.exists()


def test_screen_checkpoint_refuses_code_among_the_tensors(copied, tmp_path):
    made = tmp_path / "made"
    file, offset, length = max(read_object_places(copied / ".metadata"), key=lambda at: at[2])
    with (copied / file).open("r+b") as stream:
        stream.seek(offset)
        pickled = stream.read(length).find(b"\x80\x02")  # the pickle inside of the zip archive
        stream.seek(offset + pickled)
        stream.write(pickle.dumps(Bomb(made), protocol=2))
    with pytest.raises(ValueError, match=rf"{file} at byte {offset}"):
        screen_checkpoint(copied)
    assert not made.exists()


def test_load_refuses_bad_pickles_that_a_manifest_lists(four):
    for said in four[3]:
        assert "no checkpoint of this run can be used" in said[EVIL]
        assert re.search(r"step_2 is not used: .*common\.pt.*requires", said[EVIL]), said[EVIL]
    assert not (four[1] / "made").exists()


def load_nothing(run: Path, policy: Policy, model: Path) -> str:
    with pytest.raises(ValueError) as raised:
        checkpoints_of(run, policy, model, DIMS).load()
    dist.barrier()
    return str(raised.value)


def load_past_damage(policy: Policy, groups: Groups, model: Path, run: Path) -> dict[str, str]:
    """For each file of the newest checkpoint: the message after a flipped bit in it."""
    rank, schedule = groups.rank, schedule_of(policy)
    save_checkpoint(run, 1, policy, model, PAIR)
    step(policy, groups)
    save_checkpoint(run, 2, policy, model, PAIR)
    newest, said = run / "checkpoints" / "step_2", {}
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        if rank == 0:
            flip_a_bit(path)
        dist.barrier()
        with redirect_stderr(io.StringIO()) as errors:
            state = checkpoints_of(run, policy, model, PAIR).load()
        assert state.step == 1, path
        if rank == 0:
            flip_a_bit(path)
        said[str(path.relative_to(newest))] = errors.getvalue()
    dist.barrier()
    assert checkpoints_of(run, policy, model, PAIR).load().step == 2
    if rank == 0:  # consistent with its manifest, yet incomplete
        os.truncate(newest / "__1_0.distcp", 1000)
        manifest.write_manifest(
            newest, manifest.hash_files(newest, dict(manifest.read_manifest(newest)))
        )
    dist.barrier()
    assert checkpoints_of(run, policy, model, PAIR).load().step == 1
    assert schedule_of(policy) == schedule, "a failed load has left its schedule"
    return said


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_load_names_a_flipped_bit_in_any_file_and_goes_back(two):
    said = two[2][0]["past damage"]
    assert said.keys() >= {"__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "trainer.json"}
    assert said.keys() >= {"manifest.json", "random_states.safetensors", "hf_config/config.json"}
    for name, message in said.items():
        if name != "manifest.json":  # there the bit may change any name or number
            assert f"step_2 is not used: {name} is damaged" in message.replace("rank 1: ", "")


def load_without_descriptors(policy: Policy, model: Path, run: Path) -> str:
    """The message if rank 1 cannot open files for a while: a transient error."""
    save_checkpoint(run, 1, policy, model, PAIR)
    save_checkpoint(run, 2, policy, model, PAIR)
    checkpoints = checkpoints_of(run, policy, model, PAIR)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    with pytest.raises(TimeoutError) as raised:
        checkpoints.load()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert checkpoints.load().step == 2
    return str(raised.value)


def test_load_skips_no_checkpoint_that_a_rank_cannot_read_for_now(two):
    first, second = (rank["descriptors"] for rank in two[2])
    assert first == f"rank 1: {second}"
    assert "step_2 cannot be read: [Errno 24] Too many open files" in second
    assert "manifest.json'. It may be intact: start the same command again" in second


def ask_for_steps_done(rank: int, views: list[Path]) -> int:
    return steps_done(views[rank])


def test_steps_done_ranks_agree_where_views_differ(tmp_path):
    """As on a network file system, where each host caches attributes for a while."""
    new, old = tmp_path / "new", tmp_path / "old"
    (new / "step_20").mkdir(parents=True)
    (old / "step_10").mkdir(parents=True)
    assert run_ranks(3, ask_for_steps_done, [new, old, tmp_path / "nothing"]) == [20] * 3


def test_what_lives_on_the_host_is_written_from_its_place():
    whole = torch.arange(12.0).view(3, 4)
    rows, columns = HostMemory(borrows=True).copy([whole[1:], whole[:, 1:]])
    assert torch.frombuffer(rows, dtype=whole.dtype).data_ptr() == whole[1:].data_ptr()
    assert torch.frombuffer(columns, dtype=whole.dtype).equal(whole[:, 1:].flatten())
    [copy] = HostMemory().copy([whole])
    whole.zero_()
    assert sum(torch.frombuffer(copy, dtype=whole.dtype)) == sum(range(12))


def test_set_random_state_of_another_kind_of_device():
    """On a CPU, load a row that a GPU has saved: it has states of more generators."""
    torch.manual_seed(3)
    row = torch.cat([megatron_state.random_state(), torch.zeros(48, dtype=torch.uint8)])
    torch.manual_seed(4)
    before = torch.get_rng_state()
    megatron_state.set_random_state(row)
    assert torch.equal(torch.get_rng_state(), before)
    megatron_state.set_random_state(row[:-48])
    assert not torch.equal(torch.get_rng_state(), before)


def schedule_of(policy: Policy) -> list[tuple[int, float]]:
    return [
        (policy.scheduler.num_steps, group["lr"])
        for part in policy.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
    ]
