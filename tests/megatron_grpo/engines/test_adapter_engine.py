"""A running vLLM that computes with the adapter that was pushed last."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from helpers.engines import largest_logprob_error, random_prompts, sampling_params
from helpers.policies import tiny_config
from helpers.pushes import rollout_overrides
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines import EnginePool, EngineServers, Generation, RolloutClient
from megatron_grpo.engines.expected_sums import loaded_sums
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import Layout, ParallelDims, Sender

R4 = {"r": 4, "lora_alpha": 12.0}


def adapter_of(base: Path, folder: Path, seed: int, modules: Any) -> Path:
    """A random adapter, saved by PEFT, and beside it the model with which it is merged."""
    torch.manual_seed(seed)
    config = PeftConfig(**R4, target_modules=modules, init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(folder / "merged")
    return folder


class Trainer:
    """A single rank that has the base and pushes adapters."""

    def __init__(self, sync: WeightSync, client: RolloutClient, scale: float) -> None:
        self.sync, self.client, self.scale, self.version = sync, client, scale, 0

    def push(self, adapter: Path) -> None:
        values = load_file(adapter / "adapter_model.safetensors")
        scaled = {n: v * self.scale if ".lora_B." in n else v for n, v in values.items()}
        self.version += 1
        self.sync.push(scaled, self.version, PhaseTimer(lambda name: None))

    def generate(self, **overrides: Any) -> list[Sample]:
        # Longer than a block of the prefix cache: one that outlived its adapter would show.
        prompts = random_prompts(4, lengths=(70, 100))
        params = sampling_params(**{"policy_version": self.version} | overrides)
        return self.client.generate(Generation(prompts, params))


@contextmanager
def trainer(base: Path, adapter: Path, logs: Path, lora: LoraConfig, **rollout: Any) -> Iterator:
    config = RolloutConfig(max_completion_length=16, **rollout)
    servers = EngineServers(ModelConfig(path=base, dtype="float32"), config, logs, None, lora=lora)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        servers.wait_ready(240)
        overrides = [
            f"lora.{name}={value}"
            for name, value in lora
            if name not in ("exclude_modules", "target_modules")
        ]
        overrides.append(f"lora.target_modules=[{','.join(lora.target_modules)}]")
        cfg = tiny_config(
            base, ParallelDims(), *rollout_overrides(config, servers.base_urls), *overrides
        )
        client = RolloutClient(EnginePool(servers, config), config, lora)
        weights = load_file(base / "model.safetensors")
        of_weights, of_adapter = (
            Sender(0, Layout.of_whole_tensors(sizes), dict.fromkeys(sizes, range(1)))
            for sizes in (
                {name: tuple(each.shape) for name, each in tensors.items()}
                for tensors in (weights, load_file(adapter / "adapter_model.safetensors"))
            )
        )
        shape, cpu = read_shape(base), torch.device("cpu")
        loaded = loaded_sums(cfg, shape, of_weights, weights)
        with closing(WeightSync(cfg, shape, of_adapter, cpu, 1, client, loaded=loaded)) as sync:
            yield Trainer(sync, client, lora.scale)
    finally:
        dist.destroy_process_group()
        servers.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_after_a_push_samples_are_those_of_the_base_with_the_new_adapter(
    tmp_path, tied_model, size
):
    modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    one, other = (
        adapter_of(tied_model, tmp_path / name, seed, modules)
        for seed, name in enumerate(("one", "other"))
    )
    lora = LoraConfig(**R4, target_modules=tuple(modules))
    with trainer(tied_model, one, tmp_path, lora, tensor_parallel_size=size) as ours:
        for adapter in (one, other, one):
            ours.push(adapter)
            samples = ours.generate()
            assert {sample.policy_version for sample in samples} == {ours.version}
            assert largest_logprob_error(adapter / "merged", samples) < 1e-4
        assert largest_logprob_error(tied_model, samples) > 1e-2  # the adapter has an effect
