"""The product does not grow unseen: sizes of rooms, and what one training step enters.

Every figure is a ceiling that may only fall. A change that raises one says so in the CHANGELOG, and
why; one that lowers a figure by more than a few lines lowers its ceiling.
"""

from pathlib import Path

import pytest

from bench_code import lines_of_rooms, trace_step

ROOT = Path(__file__).parents[1]
LINES = {
    "megatron_grpo": 2992,
    "megatron_grpo/agents": 3246,
    "megatron_grpo/algorithm": 659,
    "megatron_grpo/batch": 1049,
    "megatron_grpo/checkpoints": 1405,
    "megatron_grpo/config": 3333,
    "megatron_grpo/data": 1526,
    "megatron_grpo/doctor": 943,
    "megatron_grpo/engine_weights": 726,
    "megatron_grpo/engines": 5923,
    "megatron_grpo/evaluation": 330,
    "megatron_grpo/integrations": 491,
    "megatron_grpo/launch": 1111,
    "megatron_grpo/planning": 5393,
    "megatron_grpo/policy": 5623,
    "megatron_grpo/reporting": 1787,
    "megatron_grpo/rewards": 1894,
    "megatron_grpo/rollout": 1476,
    "megatron_grpo/viewer": 295,
    "megatron_grpo/watchdog": 961,
    "megatron_grpo/workers": 954,
    "checkpoint_convert": 4925,
    "checkpoint_convert/families": 2109,
    "checkpoint_convert/formats": 1180,
    "checkpoint_convert/quantized": 1336,
    "parallel": 5317,
    "parallel/weight_transfer": 1561,
}


def test_no_room_is_larger_than_its_ceiling():
    found = lines_of_rooms(ROOT)
    assert found.keys() == LINES.keys(), "a new room needs a ceiling, and one that is gone has none"
    too_large = {room: (found[room], most) for room, most in LINES.items() if found[room] > most}
    assert not too_large, "(lines, ceiling) by room: fold, or raise it and say why in the CHANGELOG"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("has_agents", "most_files", "most_functions"), [(False, 86, 436), (True, 96, 494)]
)
def test_a_step_enters_no_more_code_than_its_ceiling(has_agents, most_files, most_functions):
    by_rank = trace_step(ROOT, has_agents=has_agents)
    entered = set().union(*by_rank.values())
    assert len({file for file, _ in entered}) <= most_files
    assert len(entered) <= most_functions
