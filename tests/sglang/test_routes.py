"""The experts that SGLang tells of each token, against the routers of transformers."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from helpers.engines import SGLANG_PYTHON, random_prompts, running_engine
from helpers.models import servable_model


def test_samples_tell_the_experts_of_every_token_that_was_read(tmp_path):
    folder = servable_model(tmp_path, "qwen3_moe", moe_intermediate_size=128)
    options = {"python": SGLANG_PYTHON, "router_replay": True}
    with running_engine("sglang", folder, tmp_path, **options) as engine:
        engine.push(folder)
        # The second time, the prompts are in its cache.
        made = [engine.generate(random_prompts(2), router_replay=True) for _ in range(2)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sample in (*made[0], *made[1]):
        tokens = torch.tensor([[*sample.prompt.token_ids, *sample.completion_ids[:-1]]])
        with torch.inference_mode():
            logits = model(tokens, output_router_logits=True).router_logits
        topk = model.config.num_experts_per_tok
        chosen = torch.stack([layer.topk(topk).indices for layer in logits], dim=1).numpy()
        np.testing.assert_array_equal(np.sort(sample.routed_experts), np.sort(chosen))
