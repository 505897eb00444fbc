"""Plans of pushes from trainer ranks to engine workers, executed on tensors in one process."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from checkpoint_convert import hf_tensors
from checkpoint_convert.megatron import first_senders, megatron_sender
from checkpoint_convert.vllm import EngineDims, engine_layouts
from helpers.models.shapes import LLAMA_70B, QWEN3_30B, models
from parallel import (
    Box,
    Layout,
    ParallelDims,
    Sender,
    all_shares,
    check_push,
    intersect,
    plan_sends,
    senders_by_worker,
)
from parallel.reshard import check_arrivals
from parallel.views import as_whole
from push_table import traffic


def sender_at(shape, dims, rank):
    return megatron_sender(shape, dims, dims.coordinates(rank), transformer_engine=True)


def senders_of(shape, dims):
    return [sender_at(shape, dims, rank) for rank in range(dims.world_size)]


def num_bytes(copies, itemsizes):
    return sum(copy.destination_box.num_elements * itemsizes[copy.destination] for copy in copies)


def numbered_weights(shape):
    """Weights with distinct integers as elements."""
    weights, start = {}, 1
    for name, size in hf_tensors(shape).items():
        count = torch.Size(size).numel()
        weights[name] = torch.arange(start, start + count).reshape(size)
        start += count
    return weights


def filled(layout, weights):
    """Local tensors of a layout, 0 outside of its pieces."""
    tensors = {name: torch.zeros(size, dtype=torch.int64) for name, size in layout.shapes.items()}
    files = Layout.of_whole_tensors({name: tuple(value.shape) for name, value in weights.items()})
    for copy in intersect(files, layout):
        move(copy, weights, tensors)
    return tensors


def move(copy, source, destination):
    values = as_whole(source[copy.source][copy.source_box.slices], copy.source_axes)
    target = destination[copy.destination][copy.destination_box.slices]
    as_whole(target, copy.destination_axes)[:] = values


@st.composite
def pushes(draw):
    """A model, a trainer's mesh and the layouts of an engine's workers that can split it."""
    shape, dims = draw(models())
    engine = EngineDims(
        tensor=draw(st.sampled_from([1, 2, 3, 4, 6])), expert_parallel=draw(st.booleans())
    )
    try:
        workers = engine_layouts(shape, engine)
    except ValueError:
        assume(False)
    return shape, dims, workers


@given(pushes(), st.integers(1, 40))
def test_every_worker_receives_every_element_of_its_shard_once(push, max_elements):
    shape, dims, workers = push
    weights = numbered_weights(shape)
    arrived = [
        {name: torch.zeros(size, dtype=torch.int64) for name, size in worker.shapes.items()}
        for worker in workers
    ]
    arrivals = [[] for _ in workers]
    for sender in senders_of(shape, dims):
        held = filled(sender.layout, weights)
        for worker, copies in plan_sends(sender, workers, max_elements).items():
            for copy in copies:
                assert copy.source_box.num_elements <= max_elements
                move(copy, held, arrived[worker])
            arrivals[worker] += copies
    for worker, copies, tensors in zip(workers, arrivals, arrived, strict=True):
        check_arrivals(worker, copies)
        expected = filled(worker, weights)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@settings(max_examples=30)
@given(pushes())
def test_ranks_that_hold_the_same_tensors_say_so(push):
    shape, dims, _ = push
    senders = senders_of(shape, dims)
    pieces = [{} for _ in senders]
    for sender, by_name in zip(senders, pieces, strict=True):
        for piece in sender.layout.pieces:
            by_name.setdefault(piece.local, set()).add((piece.tensor, piece.box, piece.local_box))
    for sender in senders:
        own = pieces[sender.rank]  # excludes tensors that are only padding
        tied_copies = [name for name in own if not sender.owners[name]]
        assert len(tied_copies) == any(
            shape.tie_word_embeddings and name.endswith("output_layer.weight") for name in own
        )
        for name in own.keys() - tied_copies:
            same = [rank for rank, others in enumerate(pieces) if others.get(name) == own[name]]
            assert list(sender.owners[name]) == same


@settings(max_examples=30)
@given(pushes(), st.integers(1, 5))
def test_traffic_equals_the_sum_of_all_plans(push, num_engines):
    shape, dims, workers = push
    senders = senders_of(shape, dims)
    shares = list(all_shares(first_senders(shape, dims), workers))
    itemsizes = {name: 4 if "norm" in name else 2 for worker in workers for name in worker.shapes}
    found = traffic(
        shares,
        num_workers=len(workers),
        num_ranks=dims.world_size,
        num_engines=num_engines,
        itemsizes=itemsizes,
        max_elements=40,
    )
    plans = [plan_sends(sender, workers, 40) for sender in senders]
    assert found.sent == [
        num_bytes(chain.from_iterable(plan.values()), itemsizes) for plan in plans
    ]
    assert found.num_messages == sum(len(copies) for plan in plans for copies in plan.values())
    parameters = [num_bytes_of_parameters(worker, itemsizes) for worker in workers]
    assert found.received == parameters * num_engines
    assert sum(found.sent) == sum(parameters)
    assert found.imbalance == pytest.approx(max(found.sent) / (sum(parameters) / dims.world_size))
    assert found.forwarded == parameters * (num_engines - 1) + [0] * len(workers)
    assert senders_by_worker(shares, len(workers)) == [
        [rank for rank, plan in enumerate(plans) if worker in plan]
        for worker in range(len(workers))
    ]


def num_bytes_of_parameters(worker, itemsizes):
    """Bytes of a worker's parameters, without vocabulary padding, which is zero from the start."""
    whole = sum(torch.Size(size).numel() * itemsizes[name] for name, size in worker.shapes.items())
    return whole - sum(box.num_elements * itemsizes[name] for name, box in worker.zeros)


def test_a_push_is_whole_only_with_every_sender():
    dims = ParallelDims(tensor=2, pipeline=2, data=2)
    workers = engine_layouts(LLAMA_70B, EngineDims(tensor=4))
    senders = list(first_senders(LLAMA_70B, dims))
    shares = [plan_sends(sender, workers, 1 << 40) for sender in senders_of(LLAMA_70B, dims)]
    num_boxes = sum(len(copies) for plan in shares for copies in plan.values())
    assert check_push(senders, workers) == num_boxes
    with pytest.raises(ValueError, match=r"worker 2 of 4: .*\n  model\.layers\.40\."):
        check_push(senders[:-1], workers)


def test_a_rank_of_a_70b_job_meets_each_worker_once_a_piece_and_sends_its_fair_share(monkeypatch):
    overlap, met = Box.overlap, Counter()

    def counting(ours: Box, theirs: Box) -> Box | None:
        met[rank] += 1
        return overlap(ours, theirs)

    monkeypatch.setattr(Box, "overlap", counting)
    dims = ParallelDims(tensor=4, pipeline=4, data=4)
    workers = engine_layouts(LLAMA_70B, EngineDims(tensor=8))
    itemsizes = dict.fromkeys(workers[0].shapes, 2)
    sent = []
    for rank in range(dims.world_size):
        sender = sender_at(LLAMA_70B, dims, rank)
        plan = plan_sends(sender, workers, 1 << 27)
        # Not compared with each of the workers' 5784 boxes, nor for the pieces of other ranks.
        assert 0 < met[rank] <= len(sender.layout.pieces) * len(workers)
        sent.append(num_bytes(chain.from_iterable(plan.values()), itemsizes))
        assert len(plan) <= 3  # workers that a rank sends to
    assert max(sent) / (sum(sent) / len(sent)) < 1.05
    assert sum(sent) == sum(num_bytes_of_parameters(worker, itemsizes) for worker in workers)


@pytest.mark.parametrize(("data", "sharers"), [(3, 3), (4, 4), (6, 3), (32, 4)])
def test_at_most_four_ranks_with_the_same_tensors_send_them(data, sharers):
    dims = ParallelDims(tensor=8, pipeline=4, data=data)
    workers = engine_layouts(LLAMA_70B, EngineDims(tensor=8))
    shares = all_shares(first_senders(LLAMA_70B, dims), workers)
    senders = senders_by_worker(shares, len(workers))
    for worker, ranks in enumerate(senders):
        places = [dims.coordinates(rank) for rank in ranks]
        # All ranks of a stage have the norms, but only those that hold the worker's other weights
        # send them.
        assert {place.tensor for place in places} == {worker}
        assert len({place.data for place in places}) == sharers
        assert len(ranks) == sharers * dims.pipeline


def test_ranks_with_equal_slices_of_a_stack_send_equal_parts():
    slice_ = Layout.of_whole_tensors({"w": (1, 8)})
    for rank in range(2):
        (copy,) = plan_sends(Sender(rank, slice_, {"w": range(2)}), [slice_], 8)[0]
        assert copy.source_box == Box((0, 4 * rank), (1, 4))


def test_experts_are_sent_by_the_ranks_that_hold_them():
    shape = replace(QWEN3_30B, num_layers=2)
    dims = ParallelDims(tensor=2, data=4, expert=4, expert_tensor=1)
    workers = engine_layouts(shape, EngineDims(tensor=4, expert_parallel=True))
    for sender in senders_of(shape, dims):
        experts = {
            (worker, copy.destination_box.start[0])
            for worker, copies in plan_sends(sender, workers, 1 << 27).items()
            for copy in copies
            if "experts" in copy.destination
        }
        # Two ranks hold the same 32 experts, which all go to one worker; each sends half.
        place = dims.expert_place(dims.coordinates(sender.rank))
        assert {worker for worker, _ in experts} == {place.expert}
        assert len(experts) in (16, 32)


def test_a_worker_receives_in_the_order_of_its_rows():
    """Gate and up of an expert, then of the next, so that a GPU sums all of them at once."""
    dims = ParallelDims(data=4, expert=4, expert_tensor=1)
    shape = replace(QWEN3_30B, num_layers=2)
    workers = engine_layouts(shape, EngineDims(tensor=2))
    for sender in senders_of(shape, dims):
        for copies in plan_sends(sender, workers, 1 << 27).values():
            places = [(copy.destination, copy.destination_box.start) for copy in copies]
            assert places == sorted(places)
