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
    "megatron_grpo": 3636,
    "megatron_grpo/agents": 3224,
    "megatron_grpo/algorithm": 819,
    "megatron_grpo/batch": 1114,
    "megatron_grpo/checkpoints": 1397,
    "megatron_grpo/config": 3397,
    "megatron_grpo/data": 1518,
    "megatron_grpo/doctor": 916,
    "megatron_grpo/engine_weights": 710,
    "megatron_grpo/engines": 5796,
    "megatron_grpo/evaluation": 327,
    "megatron_grpo/integrations": 493,
    "megatron_grpo/launch": 1579,
    "megatron_grpo/planning": 5359,
    "megatron_grpo/policy": 5502,
    "megatron_grpo/reporting": 1786,
    "megatron_grpo/rewards": 1878,
    "megatron_grpo/rollout": 1444,
    "megatron_grpo/viewer": 289,
    "megatron_grpo/watchdog": 984,
    "megatron_grpo/workers": 966,
    "checkpoint_convert": 4808,
    "checkpoint_convert/families": 2072,
    "checkpoint_convert/formats": 1161,
    "checkpoint_convert/quantized": 1330,
    "parallel": 5269,
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
    ("has_agents", "most_files", "most_functions"), [(False, 86, 436), (True, 96, 494)]
)
def test_a_step_enters_no_more_code_than_its_ceiling(has_agents, most_files, most_functions):
    by_rank = trace_step(ROOT, has_agents=has_agents)
    entered = set().union(*by_rank.values())
    assert len({file for file, _ in entered}) <= most_files
    assert len(entered) <= most_functions
