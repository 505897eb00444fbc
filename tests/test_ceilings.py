"""The product does not grow unseen: sizes of rooms, and what one training step enters.

Every figure is a ceiling that may only fall; comments are not counted. A change that raises one
says so in the CHANGELOG, and why; one that lowers a figure by more than a few lines lowers its
ceiling.
"""

from pathlib import Path

import pytest

from bench_code import lines_of_rooms, trace_step

ROOT = Path(__file__).parents[1]
LINES = {
    "megatron_grpo": 4208,
    "megatron_grpo/agents": 3483,
    "megatron_grpo/algorithm": 815,
    "megatron_grpo/batch": 1121,
    "megatron_grpo/checkpoints": 1495,
    "megatron_grpo/config": 4043,
    "megatron_grpo/data": 1630,
    "megatron_grpo/doctor": 922,
    "megatron_grpo/engine_weights": 713,
    "megatron_grpo/engines": 5971,
    "megatron_grpo/evaluation": 312,
    "megatron_grpo/integrations": 493,
    "megatron_grpo/launch": 1589,
    "megatron_grpo/planning": 5627,
    "megatron_grpo/policy": 5600,
    "megatron_grpo/reporting": 1918,
    "megatron_grpo/rewards": 1878,
    "megatron_grpo/rollout": 1460,
    "megatron_grpo/viewer": 332,
    "megatron_grpo/watchdog": 986,
    "megatron_grpo/workers": 969,
    "checkpoint_convert": 5034,
    "checkpoint_convert/families": 2090,
    "checkpoint_convert/formats": 1161,
    "checkpoint_convert/quantized": 1336,
    "parallel": 5428,
    "parallel/weight_transfer": 1568,
}


def test_no_room_is_larger_than_its_ceiling():
    found = lines_of_rooms(ROOT)
    assert found.keys() == LINES.keys(), "a new room needs a ceiling, and one that is gone has none"
    too_large = {room: (found[room], most) for room, most in LINES.items() if found[room] > most}
    assert not too_large, "(lines, ceiling) by room: fold, or raise it and say why in the CHANGELOG"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("has_agents", "most_files", "most_functions"), [(False, 93, 463), (True, 99, 519)]
)
def test_a_step_enters_no_more_code_than_its_ceiling(has_agents, most_files, most_functions):
    by_rank = trace_step(ROOT, has_agents=has_agents)
    entered = set().union(*by_rank.values())
    assert len({file for file, _ in entered}) <= most_files
    assert len(entered) <= most_functions
