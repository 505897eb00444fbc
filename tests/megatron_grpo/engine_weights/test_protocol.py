"""A worker's record of the weights that it holds, and the checks of its reports."""

import pytest
from torch.nn import Linear, Module, Parameter

from megatron_grpo.engine_weights.protocol import (
    LOADED,
    PushFailed,
    PushState,
    check_reports,
    pushable_parameters,
)

SUMS = {"a": 1, "b": 2}


def begun() -> PushState:
    """A worker with the channels of one trainer, which has begun a push."""
    state = PushState()
    state.use_channels("channels")
    state.begin_push("7-a", "channels")
    return state


def test_weights_are_a_pushs_from_its_end_to_the_next_ones_begin():
    state = begun()
    assert state.held == ""
    state.finish_push("7-a")
    assert state.held == ""  # not all parameters are written
    state.mark_loaded(SUMS)
    check(state)  # no fault
    state.finish_push("7-a")
    assert state.held == "7-a"
    state.begin_push("8-b", "another trainer's")
    assert state.held == "7-a"
    state.begin_push("8-b", "channels")
    assert state.held == ""


def test_dropped_weights_are_not_the_loaded_ones():
    state = PushState()
    state.hold_loaded()
    assert state.held == LOADED
    state.drop_weights()
    state.hold_loaded()
    assert state.held == ""


def check(state: PushState) -> None:
    check_reports(["http://engine"], [[state.push_report()]], "7-a", [SUMS])


@pytest.mark.parametrize(("push", "shown"), [("", "not begun"), ("7-b", "7-b")])
def test_a_worker_with_another_trainers_push_is_named(push, shown):
    state = PushState()
    state.use_channels("channels")
    state.begin_push(push, "channels")
    state.mark_loaded(SUMS)  # a push may bring the loaded weights
    fault = rf"http://engine worker 0: another trainer has connected to it \(its push: {shown}\)"
    with pytest.raises(PushFailed, match=fault):
        check(state)


def test_pushes_do_not_fill_views_and_derived_tensors_of_parameters():
    model = Module()
    model.up, model.absorbed, model.down = Linear(4, 6), Module(), Linear(6, 4, bias=False)
    model.absorbed.values = Parameter(model.up.weight.data[2:].T)
    model.absorbed.copied = Parameter(model.up.weight.data[2:].T.clone())
    model.absorbed.W_UV = Parameter(model.up.weight.data[2:].T.clone())
    assert list(pushable_parameters(model)) == [
        "up.weight",
        "up.bias",
        "absorbed.copied",
        "down.weight",
    ]
