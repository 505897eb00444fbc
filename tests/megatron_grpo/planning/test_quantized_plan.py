"""What a plan counts of engines with weights of 8 bits."""

from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from helpers.published_models import write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.memory import EngineBytes, engine_bytes


def engine(folder: Path, published: str, quantization: str) -> EngineBytes:
    path = write_config(folder / published, published)
    given = [f"model.path={path}", f"rollout.quantization={quantization}"]
    cfg = load_config(Path("configs/grpo_70b.yaml"), given)
    found = engine_bytes(cfg, read_shape(path), CARDS["h100"])
    assert found is not None
    return found


@pytest.mark.parametrize("quantization", ["fp8", "fp8_channel", "int8"])
def test_half_of_the_weights_leaves_room_for_more_tokens(tmp_path, quantization):
    whole, half = (engine(tmp_path, "Llama-3.3-70B", each) for each in ("none", quantization))
    head_and_embedding = 2 * 2 * 128_256 * 8_192 // 8  # in bfloat16, on 8 workers
    assert half.weights - head_and_embedding == pytest.approx(
        (whole.weights - head_and_embedding) / 2, rel=1e-3
    )
    assert half.pushed == half.weights
    assert half.cached_tokens > 1.1 * whole.cached_tokens
