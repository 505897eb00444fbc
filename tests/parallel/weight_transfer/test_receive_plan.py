"""Init info and plans exchanged before a push: plain data, checked before use."""

import json

import pytest
import torch

from parallel.layout import Box, Copy
from parallel.weight_transfer.connect import check_arriving, plan_text, read_plan
from parallel.weight_transfer.rendezvous import RendezvousAddress, TransferInitInfo

INIT_INFO = TransferInitInfo(
    RendezvousAddress("10.0.0.1", 4711), 65536, 2, False, [[0, 1], [1]], [[("w", [3], [1])], []]
)
PARAMETERS = {
    "w": torch.zeros(4, dtype=torch.bfloat16),
    "m": torch.zeros(2, 3, dtype=torch.bfloat16),
}
PADDING = (("w", Box((3,), (1,))),)


def arriving(*boxes, dtype="bfloat16"):
    return [(name, dtype, Box(start, size)) for name, start, size in boxes]


WHOLE = [("w", (0,), (3,)), ("m", (0, 0), (2, 3))]


def test_init_info_survives_json():
    decoded = json.loads(json.dumps(INIT_INFO.to_json()))
    assert TransferInitInfo.from_json(decoded) == INIT_INFO
    assert INIT_INFO.padding(0) == PADDING and INIT_INFO.padding(1) == ()


@pytest.mark.parametrize(
    "data",
    [
        None,
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


def test_a_plan_survives_json():
    arrivals = arriving(*WHOLE)
    copies = [Copy("source", box, name, box) for name, _, box in arrivals]
    assert read_plan(plan_text(copies, dict.fromkeys("wm", torch.bfloat16))) == arrivals


@pytest.mark.parametrize("text", ["", '["w"]', '[["w", "bfloat16", [-1], [1]]]'])
def test_a_malformed_plan_is_refused(text):
    with pytest.raises(ValueError, match="not a plan of arriving weights"):
        read_plan(text)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        (arriving(*WHOLE, ("m", (1, 0), (1, 2))), r"m: 2 of 6 .* several pieces"),
        (arriving(("w", (0,), (4,)), WHOLE[1]), r"w: 1 of 4 .* several pieces"),  # the padding
        (arriving(WHOLE[0], ("m", (0,), (2, 3))), r"m: .* is not a box of its shape \(2, 3\)"),
        (
            arriving(*WHOLE, dtype="float16"),
            r"w is torch\.bfloat16, and arrives as torch\.float16\n.*m is torch\.bfloat16",
        ),
    ],
)
def test_arrivals_that_do_not_fill_the_parameters_are_refused_by_name(arrivals, message):
    check_arriving(arriving(*WHOLE), PARAMETERS, PADDING)
    with pytest.raises(ValueError, match=message):
        check_arriving(arrivals, PARAMETERS, PADDING)
