"""A reward model that shares a GPU: the memory that it returns, and its scores afterwards."""

from contextlib import closing

import httpx
import pytest
import torch

from helpers.models.reward_models import reference_score, rendered, reward_model_folder
from megatron_grpo.config.reward import RewardFunction
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.reward_models import RewardModels
from megatron_grpo.launch.run_dir import bearer
from megatron_grpo.rewards.reward_model import _score, request_of

TEXTS = ["It is 4.", "First 2, then 8, so 12.", ""]


def test_a_reward_model_frees_its_share_of_the_gpu_and_scores_the_same_again(tmp_path):
    folder = reward_model_folder(tmp_path / "model", hidden_size=256)  # heads of 64
    vllm = {"dtype": "bfloat16", "max_model_len": 256, "gpu_memory_utilization": 0.3}
    arguments = {"path": str(folder), "share_gpus": True, "vllm": vllm}
    function = RewardFunction(name="reward_model", arguments=arguments)
    rollout = RolloutConfig(max_completion_length=8, enable_sleep_mode=True)
    total = torch.cuda.mem_get_info()[1]

    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    with closing(RewardModels([function], rollout, tmp_path / "logs")) as models:

        def score(text: str) -> float:
            answer = httpx.post(
                f"{models.base_urls[0]}/pooling",
                json=request_of([{"role": "user", "content": "What is 1?"}], text),
                headers=bearer(models._token),
                timeout=60,
            )
            return _score(answer)

        found, freed = [], []
        for _ in range(2):
            assert models.restart_dead(lambda done, total: None) is False  # it wakes
            found.append([score(text) for text in TEXTS])
            awake = free()
            models.end_round()
            freed.append(free() - awake)
    assert min(freed) > 0.2 * total  # all but the context of its share
    assert found[0] == found[1]
    expected = [reference_score(folder, rendered("What is 1?", text)) for text in TEXTS]
    assert found[0] == pytest.approx(expected, abs=0.1)
    assert max(expected) - min(expected) > 0.3
