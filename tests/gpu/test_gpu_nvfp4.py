"""vLLM on a GPU with a folder in NVFP4."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from helpers.models.tiny import tiny_model
from parallel import ParallelDims

MOST_GAP = 0.02
"""Gap from bfloat16's rounding, in nats; the weights are equal numbers."""


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_vllm_computes_with_the_dequantised_weights_of_an_export(tmp_path, family):
    from vllm import LLM, SamplingParams

    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    moe = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    model = tiny_model(tmp_path / "model", family, **sizes, **moe)
    import_checkpoint(model, tmp_path / "in", ParallelDims(), dtype="BF16")
    export_checkpoint(tmp_path / "in", tmp_path / "nvfp4", quantization="nvfp4")
    import_checkpoint(tmp_path / "nvfp4", tmp_path / "again", ParallelDims())
    export_checkpoint(tmp_path / "again", tmp_path / "read")  # dequantised
    tokens = torch.randint(4, 250, (1, 100), generator=torch.Generator().manual_seed(0))
    options = {"gpu_memory_utilization": 0.3, "max_model_len": 512, "enforce_eager": True}
    engine = LLM(str(tmp_path / "nvfp4"), dtype="bfloat16", **options)
    [answer] = engine.generate(
        [{"prompt_token_ids": tokens[0].tolist()}], SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    pairs = zip(tokens[0, 1:].tolist(), answer.prompt_logprobs[1:], strict=True)
    found = torch.tensor([at[token].logprob for token, at in pairs])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "read", dtype=torch.float32)
    with torch.no_grad():
        logprobs = reference(tokens).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    assert float((found - expected).abs().mean()) < MOST_GAP
