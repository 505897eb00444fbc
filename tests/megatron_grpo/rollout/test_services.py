"""What a run makes its generations with."""

import json
from contextlib import closing
from pathlib import Path

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import tiny_config
from megatron_grpo.launch.run_dir import new_token
from megatron_grpo.rollout.services import RolloutServices
from parallel import ParallelDims


def services_of(tmp_path: Path, rows: list, *overrides: str) -> RolloutServices:
    data, model = tmp_path / "sums.jsonl", tiny_model(tmp_path / "model", "qwen3")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = tiny_config(
        model,
        ParallelDims(),
        f"data.path={data}",
        f"train.run_dir={tmp_path / 'run'}",
        "rollout.base_urls=[http://127.0.0.1:9]",  # nobody is asked there
        *overrides,
    )
    return RolloutServices(cfg, read_shape(model), new_token(), num_ranks=1)


def test_rows_without_an_answer_that_the_reward_can_read_are_left_out(tmp_path: Path):
    rows = [{"prompt": str(i), "answer": "####" if i == 1 else "1"} for i in range(6)]
    overrides = "reward.functions=[math_answer]", "data.on_invalid=skip"
    with closing(services_of(tmp_path, rows, *overrides)) as services:
        assert [prompt.index for prompt in services.stream.prompts] == [0, 2, 3, 4, 5]
