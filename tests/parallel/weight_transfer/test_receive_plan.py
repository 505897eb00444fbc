"""Init info and plans, exchanged before a push: plain data that is checked before it is used."""

import json

import pytest
import torch

from parallel.layout import Box, Copy
from parallel.weight_transfer.connect import ReceivePlan, check_plans
from parallel.weight_transfer.rendezvous import RendezvousAddress, TransferInitInfo

INIT_INFO = TransferInitInfo(
    RendezvousAddress("10.0.0.1", 4711),
    65536,
    2,
    False,
    [[0, 1], [1]],
    [[("w", [3], [1])], []],
)
PARAMETERS = {
    "w": torch.zeros(4, dtype=torch.bfloat16),
    "m": torch.zeros(2, 3, dtype=torch.bfloat16),
}
PADDING = (("w", Box((3,), (1,))),)


def arriving(*boxes, dtype=torch.bfloat16):
    """The plan of these boxes: (name, start, size)."""
    copies = [Copy("source", Box(a, n), name, Box(a, n)) for name, a, n in boxes]
    return ReceivePlan.of(copies, {name: dtype for name, *_ in boxes})


WHOLE = [("w", (0,), (3,)), ("m", (0, 0), (2, 3))]


def test_init_info_survives_json():
    told = json.loads(json.dumps(INIT_INFO.to_json()))
    assert TransferInitInfo.from_json(told) == INIT_INFO
    assert INIT_INFO.padding(0) == PADDING and INIT_INFO.padding(1) == ()


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {1, 2},
        INIT_INFO.to_json() | {"bucket_bytes": 65537},  # not a multiple of the alignment
        INIT_INFO.to_json() | {"network_only": 1},
        INIT_INFO.to_json() | {"surprise": 1},
    ],
    ids=str,
)
def test_malformed_init_info_is_refused(data):
    with pytest.raises(ValueError, match="no description of a weight transfer"):
        TransferInitInfo.from_json(data)


def test_a_plan_survives_json_and_names_each_parameter_once():
    boxes = [("w", Box((0,), (2,))), ("m", Box((0, 0), (2, 3))), ("w", Box((2,), (1,)))]
    copies = [Copy("source", box, name, box) for name, box in boxes]
    plan = ReceivePlan.of(copies, {"m": torch.float32, "w": torch.bfloat16})
    assert plan.names == ["w", "m"]
    assert ReceivePlan.from_json(plan.to_json()) == plan
    assert plan.torch_dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert plan.arrivals() == boxes


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"dtypes": ["bfloat16"], "names": ["w"], "boxes": [[0, -1, 1]]}',
        '{"dtypes": ["bfloat16"], "names": ["w"], "boxes": [[1, 0, 1]]}',
        '{"dtypes": ["bfloat16"], "names": ["w"], "boxes": [[0, 0]]}',
        '{"dtypes": ["load"], "names": ["w"], "boxes": []}',
        '{"dtypes": [], "names": [], "boxes": [], "code": ""}',
    ],
)
def test_a_malformed_plan_is_refused(text):
    with pytest.raises(ValueError, match="not a plan of arriving weights"):
        ReceivePlan.from_json(text)


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([arriving(*WHOLE), arriving(("m", (1, 0), (1, 2)))], r"m: 2 of 6 .* several pieces"),
        ([arriving(("w", (0,), (4,)), WHOLE[1])], r"w: 1 of 4 .* several pieces"),  # the padding
        ([arriving(WHOLE[0], ("m", (0,), (2,)))], r"m: .* is not a box of its shape \(2, 3\)"),
        (
            [arriving(*WHOLE, dtype=torch.float16)],
            r"w is torch\.bfloat16, and arrives as torch\.float16\n.*m is torch\.bfloat16",
        ),
    ],
)
def test_plans_that_do_not_fill_the_parameters_are_refused_by_name(plans, message):
    check_plans([arriving(WHOLE[0]), arriving(WHOLE[1])], PARAMETERS, PADDING)
    with pytest.raises(ValueError, match=message):
        check_plans(plans, PARAMETERS, PADDING)
