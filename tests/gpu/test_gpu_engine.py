"""What a vLLM engine on a GPU computes."""

from pathlib import Path

import httpx
import pytest
import torch

from helpers.engines import running_engine
from helpers.models import tiny_model
from megatron_grpo.launch.run_dir import bearer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(900),  # vLLM compiles
]


def test_an_engine_in_bfloat16_does_not_round_logits_to_it(tmp_path: Path) -> None:
    """Logits above 16 would be multiples of 1/8, and so would differences of log-probabilities."""
    large = {"hidden_size": 256, "head_dim": 64, "initializer_range": 2.0}
    model = tiny_model(tmp_path / "model", "qwen3", **large)
    request = {"token_ids": [4, 5, 6], "output_mode": "text"}
    sampling = {"max_tokens": 1, "logprobs": 20, "ignore_eos": True}
    vllm = {"gpu_memory_utilization": 0.3, "max_model_len": 512}
    with running_engine("vllm", model, tmp_path, dtype="bfloat16", vllm=vllm) as engine:
        answer = httpx.post(
            f"{engine.servers.base_urls[0]}/inference/v1/generate",
            json=request | {"sampling_params": sampling},
            headers=bearer(engine.servers.token),
            timeout=60,
        )
    [position] = answer.json()["choices"][0]["logprobs"]["content"]
    first, *others = [each["logprob"] for each in position["top_logprobs"]]
    eighths = [8 * (first - other) for other in others]
    assert len(eighths) >= 18 and max(abs(x - round(x)) for x in eighths) > 0.1
