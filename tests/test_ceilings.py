"""The product does not grow unseen: sizes of rooms, and what one training step enters.

Every figure is a ceiling that may only fall. A change that raises one says so in the CHANGELOG, and
why; one that lowers a figure by more than a few lines lowers its ceiling.
"""

from pathlib import Path

import pytest

from bench_code import lines_of_rooms, trace_step

ROOT = Path(__file__).parents[1]
LINES = {
    "megatron_grpo": 3065,
    "megatron_grpo/agents": 3380,
    "megatron_grpo/algorithm": 665,
    "megatron_grpo/batch": 1069,
    "megatron_grpo/checkpoints": 1471,
    "megatron_grpo/config": 3474,
    "megatron_grpo/data": 1643,
    "megatron_grpo/doctor": 943,
    "megatron_grpo/engine_weights": 783,
    "megatron_grpo/engines": 6254,
    "megatron_grpo/evaluation": 358,
    "megatron_grpo/integrations": 491,
    "megatron_grpo/launch": 1192,
    "megatron_grpo/planning": 5407,
    "megatron_grpo/policy": 5654,
    "megatron_grpo/reporting": 1898,
    "megatron_grpo/rewards": 1967,
    "megatron_grpo/rollout": 1615,
    "megatron_grpo/viewer": 300,
    "megatron_grpo/watchdog": 988,
    "megatron_grpo/workers": 990,
    "checkpoint_convert": 5987,
    "checkpoint_convert/families": 1930,
    "checkpoint_convert/formats": 1484,
    "parallel": 5322,
    "parallel/weight_transfer": 1643,
}


def test_no_room_is_larger_than_its_ceiling() -> None:
    found = lines_of_rooms(ROOT)
    assert found.keys() == LINES.keys(), "a new room needs a ceiling, and one that is gone has none"
    too_large = {room: (found[room], most) for room, most in LINES.items() if found[room] > most}
    assert not too_large, "(lines, ceiling) by room: fold, or raise it and say why in the CHANGELOG"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("has_agents", "most_files", "most_functions"), [(False, 113, 630), (True, 126, 705)]
)
def test_a_step_enters_no_more_code_than_its_ceiling(
    has_agents: bool, most_files: int, most_functions: int
) -> None:
    by_rank = trace_step(ROOT, has_agents=has_agents)
    entered = set().union(*by_rank.values())
    assert len({file for file, _ in entered}) <= most_files
    assert len(entered) <= most_functions
