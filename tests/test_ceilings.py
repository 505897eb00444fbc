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
    "megatron_grpo": 2970,
    "megatron_grpo/agents": 3227,
    "megatron_grpo/algorithm": 657,
    "megatron_grpo/batch": 1041,
    "megatron_grpo/checkpoints": 1399,
    "megatron_grpo/config": 3299,
    "megatron_grpo/data": 1508,
    "megatron_grpo/doctor": 941,
    "megatron_grpo/engine_weights": 726,
    "megatron_grpo/engines": 5804,
    "megatron_grpo/evaluation": 327,
    "megatron_grpo/integrations": 490,
    "megatron_grpo/launch": 1097,
    "megatron_grpo/planning": 5355,
    "megatron_grpo/policy": 5536,
    "megatron_grpo/reporting": 1779,
    "megatron_grpo/rewards": 1867,
    "megatron_grpo/rollout": 1448,
    "megatron_grpo/viewer": 294,
    "megatron_grpo/watchdog": 952,
    "megatron_grpo/workers": 947,
    "checkpoint_convert": 4874,
    "checkpoint_convert/families": 2077,
    "checkpoint_convert/formats": 1169,
    "checkpoint_convert/quantized": 1331,
    "parallel": 5262,
    "parallel/weight_transfer": 1548,
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
