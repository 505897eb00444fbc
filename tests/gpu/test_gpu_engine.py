"""Results of vLLM and SGLang on a GPU."""

import httpx
import numpy as np
import pytest

from helpers.engines.live import SGLANG_PYTHON, chosen_tokens, random_prompts, running_engine
from helpers.models.tiny import tiny_model
from megatron_grpo.launch.run_dir import bearer


def test_an_engine_in_bfloat16_does_not_round_logits_to_it(tmp_path):
    """Rounded logits above 16 are multiples of 1/8, and so are differences of log-probabilities."""
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


# Attention as in DeepSeek-V3.2: SGLang's kernels know no other sizes.
SPARSE_SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_hidden_layers": 2,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "max_position_embeddings": 8192,
}


@pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="needs SGLang's own environment")
def test_sglang_reports_the_tokens_of_its_indexers(tmp_path):
    """The client refuses positions after the token's own."""
    model = tiny_model(tmp_path / "model", "deepseek_v32", **SPARSE_SIZES)
    topk, options = SPARSE_SIZES["index_topk"], {"max_total_tokens": 16384}
    options |= {"chunked_prefill_size": 4096, "mem_fraction_static": 0.5}
    replay = {"indexer_replay": True, "python": SGLANG_PYTHON, "sglang": options}
    with running_engine("sglang", model, tmp_path, dtype="bfloat16", **replay) as engine:
        client = engine.client()
        client.await_engines(lambda workers: None)
        client.serve_loaded()  # pushes of the tests are in float32
        prompts = random_prompts(2, lengths=(6000, 6100))
        # The second time, the prompts are in the engine's cache.
        made = [engine.generate(prompts, index_topk=topk) for _ in range(2)]
    for sample in (*made[0], *made[1]):
        pairs = zip(sample.routes[topk:], chosen_tokens(model, sample)[topk:], strict=True)
        shared = [
            len(np.intersect1d(ours[layer], theirs[layer])) / topk
            for ours, theirs in pairs
            for layer in range(2)
        ]
        # Two random choices share a third, and engines score in 8 bits.
        assert np.mean(shared[-2000:]) > 0.9
