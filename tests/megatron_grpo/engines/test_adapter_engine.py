"""A running vLLM computes with the adapter of the last push."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from checkpoint_convert.peft import weight_of
from helpers.engines.live import largest_logprob_error, random_prompts, running_engine, wait_until
from helpers.engines.sampling import generate
from helpers.models.conversions import weights_of, with_weights
from helpers.models.tiny import servable_model
from helpers.pushes.trainers import Trainer, trainer
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.engines.http import is_healthy
from megatron_grpo.engines.joining import FOLDER, JoinedEngine, settings_of
from megatron_grpo.engines.processes import LOOPBACK, reserve_port
from megatron_grpo.engines.server import engine_command
from megatron_grpo.policy.lora_targets import peft_tensors
from megatron_grpo.workers.child_process import ChildProcess

pytestmark = pytest.mark.slow

MODULES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
LORA = LoraConfig(r=4, lora_alpha=12.0, target_modules=MODULES)
SHARED = ("shared_experts.up_proj", "shared_experts.down_proj", "0.mlp.gate_proj")
BESIDE_EXPERTS = LORA.model_copy(update={"target_modules": (*MODULES[:3], *SHARED)})
PROMPTS = random_prompts(4, lengths=(70, 100))
"""Longer than a block of the prefix cache: a block that outlives its adapter would show."""


def merged(base: Path, folder: Path, seed: int) -> Path:
    """A model merged with a random adapter, which PEFT has saved in the folder above."""
    torch.manual_seed(seed)
    own = {"r": LORA.r, "lora_alpha": LORA.lora_alpha, "target_modules": [*MODULES]}
    config = PeftConfig(**own, init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "merged"


def merged_beside_experts(base: Path, folder: Path, seed: int) -> Path:
    """Like `merged`, for a mixture: PEFT would take the targets in shared experts for experts."""
    torch.manual_seed(seed)
    shapes = peft_tensors(BESIDE_EXPERTS, read_shape(base))
    values = {name: torch.randn(size) / 10 for name, size in shapes.items()}
    folder.mkdir()
    save_file(values, folder / "adapter_model.safetensors")
    weights = weights_of(base)
    for a in [name for name in values if ".lora_A." in name]:
        weights[weight_of(a)] += LORA.scale * values[a.replace("lora_A", "lora_B")] @ values[a]
    return with_weights(base, folder / "merged", weights)


def adapter_of(model: Path) -> dict[str, torch.Tensor]:
    """The adapter of a merged model as it is pushed: B is scaled."""
    values = load_file(model.parent / "adapter_model.safetensors")
    return {name: v * LORA.scale if ".lora_B." in name else v for name, v in values.items()}


@contextmanager
def training(
    base: Path, adapter: Path, logs: Path, size: int = 1, lora: LoraConfig = LORA
) -> Iterator[Trainer]:
    """A trainer with an engine that is given by address, so that others can join."""
    sizes, overrides = {"lora": lora, "tensor_parallel_size": size}, [f"lora.r={lora.r}"]
    overrides.append(f"lora.lora_alpha={lora.lora_alpha}")
    overrides.append(f"lora.target_modules=[{','.join(lora.target_modules)}]")
    overrides.append(f"train.run_dir={logs / 'run'}")
    with running_engine("vllm", base, logs, **sizes) as own:
        sizes["base_urls"] = own.servers.base_urls
        with (
            running_engine("vllm", base, logs, own.servers.token, **sizes) as given,
            trainer(
                base, given.servers, given.rollout, *overrides, adapter=adapter_of(adapter)
            ) as ours,
        ):
            yield ours


@contextmanager
def joined(ours: Trainer, base: Path, logs: Path) -> Iterator[str]:
    """The address of a second engine that has joined, with the model in `base`."""
    model, rollout = ours.cfg.model.model_copy(update={"path": base}), ours.cfg.rollout
    file = ours.cfg.train.run_dir / FOLDER / f"{base.name}.json"
    file.parent.mkdir(exist_ok=True, parents=True)
    with reserve_port() as reserved, open(logs / f"{base.name}.log", "wb") as log:
        port, token = reserved.getsockname()[1], ours.pool.token
        command = engine_command(model, rollout, LOOPBACK, port, None, token, lora=LORA)
        engine = JoinedEngine(f"http://{LOOPBACK}:{port}", settings_of(model, rollout, LORA))
        process = ChildProcess.start(*command, log)
        try:
            assert wait_until(lambda: is_healthy(engine.url), seconds=240)
            file.write_bytes(msgspec.json.encode(engine))
            yield engine.url
        finally:
            file.unlink(missing_ok=True)
            process.kill()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("lora", [LORA, BESIDE_EXPERTS], ids=["dense", "mixture"])
def test_push_of_an_adapter_replaces_the_last(tmp_path, tied_model, size, lora):
    base, merge = tied_model, merged
    if lora is BESIDE_EXPERTS:
        base, merge = servable_model(tmp_path / "base", "glm4_moe"), merged_beside_experts
    one, other = (merge(base, tmp_path / str(seed), seed) for seed in range(2))
    with training(base, one, tmp_path, size, lora) as ours:
        for model in (one, other, one):
            ours.weights = adapter_of(model)
            ours.push()
            samples = ours.generate(PROMPTS)
            assert {sample.policy_version for sample in samples} == {ours.version}
            assert largest_logprob_error(model, samples) < 1e-4
        assert largest_logprob_error(base, samples) > 1e-2  # the adapter has an effect


def test_push_leaves_out_an_engine_of_another_base(tmp_path, tied_model, other_model, capfd):
    model = merged(tied_model, tmp_path / "adapter", 0)
    with training(tied_model, model, tmp_path) as ours:
        ours.push()
        [own] = ours.pool.serving
        with joined(ours, other_model, tmp_path) as url:
            ours.push()
            assert [*ours.pool.serving] == [own]
            error = rf"engine {url} is lost: worker 0: .* differ from what was pushed: model\."
            assert re.search(error, capfd.readouterr().err)
        with joined(ours, tied_model, tmp_path) as url:
            ours.push()
            asked = ours.ask(PROMPTS)
            samples = generate(ours.client, asked)
            assert asked.engines == {*ours.pool.serving} == {own, url}
            assert largest_logprob_error(model, samples) < 1e-4
