"""The engine on top of `transformers`, as a client sees it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from helpers.engines.live import (
    chosen_tokens,
    largest_logprob_error,
    random_prompts,
    running_engine,
    wait_until,
)
from helpers.models.conversions import assert_same
from helpers.models.quantized import FORMATS, dequantized_copy, quantized_copy
from helpers.models.tiny import tiny_model
from megatron_grpo.data.samples import Sample
from reference_engine import engine as module
from reference_engine.engine import TransformersEngine, load_model


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        # The stacks of these families have the form of the last one's.
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3_moe", "glm4_moe", "deepseek_v3")
        ),
        "gpt_oss",
        "glm_moe_dsa",
    ],
)
def test_pushed_experts_are_taken_into_the_stacks_of_the_model(tmp_path, family):
    before, after = (tiny_model(tmp_path / str(i), family, seed=i) for i in range(2))
    with running_engine("reference", before, tmp_path) as engine:
        engine.push(after)
        assert largest_logprob_error(after, engine.generate(random_prompts(2))) < 1e-4


def test_a_quantised_folder_is_loaded_as_its_dequantised_copy(tmp_path):
    form = FORMATS["DeepSeek"]
    model = tiny_model(tmp_path / "model", "deepseek_v3")
    quantized = quantized_copy(model, tmp_path / "quantized", form)
    plain = dequantized_copy(quantized, tmp_path / "plain", form)
    found, wanted = (load_model(f, torch.float32).state_dict() for f in (quantized, plain))
    assert_same(found, wanted)


def test_requests_that_wait_with_the_same_prompt_are_one_batch(tied_model, monkeypatch):
    batches, sample = [], module.sample

    def noting(model, prompt_ids, *, seeds, **arguments):
        batches.append((prompt_ids, sorted(seeds)))
        return sample(model, prompt_ids, seeds=seeds, **arguments)

    monkeypatch.setattr(module, "sample", noting)
    engine = TransformersEngine(tied_model, torch.float32, "cpu")

    def ask(prompt_ids, seed):
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4}
        sampling |= {"stop_token_ids": [], "seed": seed}
        body = {"token_ids": prompt_ids, "sampling_params": sampling}
        [choice] = engine.generate(body, lambda: True)["choices"]
        return choice["token_ids"]

    alone = [ask([5, 6, 7], seed) for seed in range(3)]
    batches.clear()
    engine.pause({})
    with ThreadPoolExecutor() as pool:
        requests = [pool.submit(ask, [5, 6, 7], seed) for seed in range(3)]
        other = pool.submit(ask, [5, 6], 0)
        assert wait_until(lambda: engine.load({})["server_load"] == 4, 30)
        engine.resume({})
        assert [future.result() for future in requests] == alone
        other.result()
    assert sorted(batches) == [([5, 6], [0]), ([5, 6, 7], [0, 1, 2])]
    assert engine.load({})["server_load"] == 0


@pytest.mark.slow
def test_samples_have_the_tokens_of_indexers(tmp_path):
    folder = tiny_model(tmp_path, "glm_moe_dsa")
    topk = read_shape(folder).indexer.topk
    with running_engine("reference", folder, tmp_path, indexer_replay=True) as engine:
        engine.push(folder)
        samples = engine.generate(
            random_prompts(2), stop_token_ids=[*range(20, 60)], index_topk=topk
        )
    for sample in samples:
        found, wanted = sample.routes, chosen_tokens(folder, sample)
        assert found.shape == wanted.shape and len(found) > topk
        # Earlier tokens see all positions.
        np.testing.assert_array_equal(np.sort(found[topk:]), np.sort(wanted[topk:]))


def chosen_experts(folder: Path, sample: Sample) -> np.ndarray:
    """Experts that `transformers` chooses for all tokens except the last, in one pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([[*sample.prompt.token_ids, *sample.completion_ids[:-1]]])
    with torch.inference_mode():
        logits = model(tokens, output_router_logits=True).router_logits
    topk = model.config.num_experts_per_tok
    return torch.stack([layer.topk(topk).indices for layer in logits], dim=1).numpy()


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_experts", "dtype"), [pytest.param(8, np.uint8, marks=pytest.mark.slow), (300, np.int16)]
)
def test_samples_have_the_experts_of_every_token_read(tmp_path, num_experts, dtype):
    sizes = {"num_local_experts": num_experts, "num_experts_per_tok": 3}
    folder = tiny_model(tmp_path, "mixtral", **sizes)
    with running_engine("reference", folder, tmp_path, router_replay=True) as engine:
        engine.push(folder)
        # Some completions end early; the others continue as a smaller batch.
        samples = engine.generate(
            random_prompts(2), stop_token_ids=[*range(20, 60)], router_replay=True
        )
    assert len({len(sample.completion_ids) for sample in samples}) > 1
    for sample in samples:
        assert sample.routes.dtype == dtype
        np.testing.assert_array_equal(sample.routes, chosen_experts(folder, sample))
