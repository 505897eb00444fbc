"""GPUs that `--gpu` names."""

from dataclasses import replace

import pytest

from megatron_grpo.cli import app
from megatron_grpo.planning.card import CARDS, card_named

H100, B200 = CARDS["h100"], CARDS["b200"]


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("L40S", CARDS["l40s"]),
        ("96GB", replace(H100, memory=96 * 10**9)),
        (
            "96GB,495TFLOPs,4.9TB/s",
            replace(
                H100,
                memory=96 * 10**9,
                flops=495e12,
                fp8_flops=1979e12 * 495 / 989,
                memory_rate=4.9e12,
            ),
        ),
        ("b200,180gb,7700gb/s", replace(B200, memory=180 * 10**9, memory_rate=7.7e12)),
        ("a100,250TFLOPs", replace(CARDS["a100"], flops=250e12)),
    ],
)
def test_card_named_takes_a_card_and_figures_of_another(name, card):
    assert card_named(name) == card


@pytest.mark.parametrize("name", ["", "h300", "96", "96GB,", "0GB", "h100,b200", "96GB,h100", "GB"])
def test_card_named_refuses_other_text_with_what_it_takes(name):
    with pytest.raises(ValueError, match=r"one of a100, h100, .*, or memory.*96GB,990TFLOPs,4TB/s"):
        card_named(name)


def test_help_of_plan_names_every_card(capsys):
    app(["plan", "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert [name for name in CARDS if name not in shown] == []
