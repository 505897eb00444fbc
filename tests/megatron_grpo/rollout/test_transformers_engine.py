"""The engine on top of `transformers`, as a client sees it."""

from concurrent.futures import ThreadPoolExecutor

import torch

from engines import largest_logprob_error, random_prompts, running_engine, wait_until
from megatron_grpo.rollout import transformers_engine as module
from megatron_grpo.rollout.transformers_engine import TransformersEngine
from models import tiny_model


def test_pushed_experts_are_taken_into_the_stacks_of_the_model(tmp_path):
    before, after = (tiny_model(tmp_path / str(i), "qwen3_moe", seed=i) for i in range(2))
    with running_engine("transformers", before, tmp_path) as engine:
        engine.push(after)
        assert largest_logprob_error(after, engine.generate(random_prompts(2))) < 1e-4


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
        asked = [pool.submit(ask, [5, 6, 7], seed) for seed in range(3)]
        other = pool.submit(ask, [5, 6], 0)
        assert wait_until(lambda: engine.load({})["server_load"] == 4, 30)
        engine.resume({})
        assert [future.result() for future in asked] == alone
        other.result()
    assert sorted(batches) == [([5, 6], [0]), ([5, 6, 7], [0, 1, 2])]
    assert engine.load({})["server_load"] == 0
