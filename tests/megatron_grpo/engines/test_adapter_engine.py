"""A running vLLM that computes with the adapter that was pushed last."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from helpers.engines.live import (
    largest_logprob_error,
    random_prompts,
    sampling_params,
    served_model,
    wait_until,
)
from helpers.engines.sampling import Completions, event_loop, generate
from helpers.oracle.policies import tiny_config
from helpers.pushes.policies import rollout_overrides
from megatron_grpo.config.config import Config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.data.samples import Sample
from megatron_grpo.engine_weights.checksums import loaded_sums
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import is_healthy
from megatron_grpo.engines.joining import FOLDER, JoinedEngine, settings_of
from megatron_grpo.engines.pool import EnginePool, JoinFolder
from megatron_grpo.engines.processes import LOOPBACK, reserve_port
from megatron_grpo.engines.server import EngineServers, engine_command
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from megatron_grpo.workers.child_process import ChildProcess
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

    def __init__(self, cfg: Config, sync: WeightSync, client: RolloutClient) -> None:
        self.cfg, self.sync, self.client, self.version = cfg, sync, client, 0

    def push(self, adapter: Path) -> None:
        values = load_file(adapter / "adapter_model.safetensors")
        scaled = {n: v * self.cfg.lora.scale if ".lora_B." in n else v for n, v in values.items()}
        self.version += 1
        self.sync.push(scaled, self.version, PhaseTimer(lambda name: None))

    def generate(self, **overrides: Any) -> list[Sample]:
        # Longer than a block of the prefix cache: one that outlived its adapter would show.
        prompts = random_prompts(4, lengths=(70, 100))
        params = sampling_params(**{"policy_version": self.version} | overrides)
        return generate(self.client, Completions(prompts, params))

    def num_generated(self, url: str) -> float:
        """Tokens that an engine has generated."""

        async def counted() -> float:
            async with self.client.connect(url) as engine:
                return (await engine.counts()).generated

        return asyncio.run(counted())

    @contextmanager
    def joined(self, base: Path, logs: Path) -> Iterator[str]:
        """The address of a further engine that has joined, with the model in `base`."""
        model = self.cfg.model.model_copy(update={"path": base})
        rollout, lora = self.cfg.rollout, self.cfg.lora
        file = self.cfg.train.run_dir / FOLDER / f"{base.name}.json"
        file.parent.mkdir(exist_ok=True, parents=True)
        with reserve_port() as reserved, open(logs / f"{base.name}.log", "wb") as log:
            port = reserved.getsockname()[1]
            token = self.client.pool.token
            command = engine_command(model, rollout, LOOPBACK, port, None, token, lora=lora)
            engine = JoinedEngine(f"http://{LOOPBACK}:{port}", settings_of(model, rollout, lora))
            process = ChildProcess.start(*command, log)
            try:
                assert wait_until(lambda: is_healthy(engine.url), seconds=240)
                file.write_bytes(msgspec.json.encode(engine))
                yield engine.url
            finally:
                file.unlink(missing_ok=True)
                process.kill()


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
        overrides += rollout_overrides(config, servers.base_urls)
        cfg = tiny_config(base, ParallelDims(), *overrides, f"train.run_dir={logs / 'run'}")
        # As those of `rollout.base_urls`: only then can others join.
        given = EngineServers(cfg.model, cfg.rollout, logs, servers.token, lora=lora)
        pool = EnginePool(given, config, JoinFolder.of_run(cfg))
        client = RolloutClient(pool, config, event_loop(), lora)
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
            yield Trainer(cfg, sync, client)
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


@pytest.mark.slow
def test_an_engine_that_joins_gets_the_adapter_and_one_of_another_base_is_left_out(
    tmp_path, tied_model, capfd
):
    modules = ["q_proj", "down_proj"]
    adapter = adapter_of(tied_model, tmp_path / "adapter", 0, modules)
    other = served_model(tmp_path / "other", "qwen3", tied=True, seed=1)
    lora = LoraConfig(**R4, target_modules=tuple(modules))
    with trainer(tied_model, adapter, tmp_path, lora) as ours:
        ours.push(adapter)
        [own] = ours.client.pool.serving
        with ours.joined(other, tmp_path) as url:
            ours.push(adapter)
            assert [*ours.client.pool.serving] == [own]
            told = (
                rf"rollout engine {url} is lost: worker 0: .* differ from what was pushed: model\."
            )
            assert re.search(told, capfd.readouterr().err)
        with ours.joined(tied_model, tmp_path) as url:
            ours.push(adapter)
            assert [*ours.client.pool.serving] == [own, url]
            samples = ours.generate()
            assert ours.num_generated(url) > 0
            assert largest_logprob_error(adapter / "merged", samples) < 1e-4
