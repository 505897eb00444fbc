"""Adapters: their files, checkpoints and starts, the reference that follows them, and inputs.

Their log-probabilities and gradients are rows of test_model.py.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.formats.torch_dist import read_chunks
from checkpoint_convert.merge import merge_adapter
from checkpoint_convert.peft import adapter_tensors, tensor_in_whole
from checkpoint_convert.verify import verify_weights
from helpers.models.quantized import FORMATS, dequantized_copy, quantized_copy
from helpers.models.tiny import tiny_model
from helpers.models.towers import tiny_multimodal
from helpers.oracle.adapters import SCALE, TARGETS, options, oracle, set_b
from helpers.oracle.grpo import oracle_logprobs
from helpers.oracle.policies import (
    LENGTHS,
    Boxes,
    accumulate,
    assert_equal_tensors,
    boxes_of,
    check_logprobs,
    checkpoints_of,
    gradient_boxes,
    layout,
    load_oracle,
    logprobs_of,
    pack_all,
    random_sequences,
    save_checkpoint,
    start_policy,
    take_step,
    tiny_config,
    whole,
)
from helpers.oracle.train_steps import BETA, BUDGETS, CLIPS, Case, OffPolicy, batches_of, config
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.checkpoints import manifest
from megatron_grpo.checkpoints.state import REFERENCE
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.config import Config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.lora_targets import starting_adapter
from megatron_grpo.policy.model import Policy, build_policy, unwrapped
from megatron_grpo.policy.reference import Reference, reference_of
from megatron_grpo.policy.skipped_steps import name_nonfinite
from megatron_grpo.train_step import accumulate_gradient
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups

GIVEN = options("llama")
ONE, TENSOR, STAGES = ParallelDims(), ParallelDims(tensor=2), ParallelDims(pipeline=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama", tied=True, num_hidden_layers=4)


def adapters_of(policy: Policy) -> Boxes:
    return boxes_of(policy.adapters, policy.adapters.parameters())


def train(rank: int, folder: Path, dims: ParallelDims, run: Path) -> list[Boxes]:
    """Adapters after two steps, which are saved and exported, and after one more."""
    policy, groups = start_policy(rank, folder, dims, *GIVEN)
    take_step(policy, groups)
    take_step(policy, groups)
    save_checkpoint(run, 2, policy, folder, dims)
    export_model(run / "hf", policy, tiny_config(folder, dims, *GIVEN), groups)
    saved = adapters_of(policy)
    take_step(policy, groups)
    return [saved, adapters_of(policy)]


def resume(rank: int, folder: Path, dims: ParallelDims, run: Path) -> list[Boxes]:
    policy, groups = start_policy(rank, folder, dims, *GIVEN)
    assert checkpoints_of(run, policy, folder, dims).load().step == 2
    export_model(run / f"hf {dims}", policy, tiny_config(folder, dims, *GIVEN), groups)
    loaded = adapters_of(policy)
    take_step(policy, groups)
    return [loaded, adapters_of(policy)]


def wholes(ranks: list[list[Boxes]]) -> list[dict[str, Tensor]]:
    """Whole adapters of each state, from every rank's parts."""
    return [whole(list(each)) for each in zip(*ranks, strict=True)]


@pytest.mark.long
def test_checkpoint_resumes_with_the_same_bits_and_over_layouts(llama, tmp_path):
    dims = layout("tp2 dp2")
    saved, later = wholes(run_ranks(4, train, llama, dims, tmp_path))
    loaded, after = wholes(run_ranks(4, resume, llama, dims, tmp_path))
    assert_equal_tensors(loaded, saved)
    assert_equal_tensors(after, later)
    loaded, after = wholes(run_ranks(2, resume, llama, STAGES, tmp_path))
    assert_equal_tensors(loaded, saved)
    for name, values in after.items():
        torch.testing.assert_close(values, later[name], atol=1e-5, rtol=1e-4)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("hf", f"hf {STAGES}")]
    assert files[0].read_bytes() == files[1].read_bytes()
    stored = load_file(files[0])
    assert_equal_tensors(stored, saved)
    keys = read_chunks(tmp_path / "checkpoints/step_2").shapes
    states = ("", *(f"optimizer.state.{each}." for each in ("param", "exp_avg", "exp_avg_sq")))
    assert keys.keys() == {state + name for state in states for name in stored}


def die_in_the_save(rank: int, folder: Path, dims: ParallelDims, run: Path) -> None:
    """One rank is killed once it has written its file, a step after the save of `train`."""
    policy, groups = start_policy(rank, folder, dims, *GIVEN)
    assert checkpoints_of(run, policy, folder, dims).load().step == 2
    take_step(policy, groups)
    write = manifest.write_hashed

    def write_and_die(*args: Any) -> None:
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        manifest.write_hashed = write_and_die
    save_checkpoint(run, 3, policy, folder, dims)


@pytest.mark.slow
def test_checkpoint_stays_if_a_rank_is_killed_in_the_next(llama, tmp_path):
    before = wholes(run_ranks(2, train, llama, TENSOR, tmp_path))
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(2, die_in_the_save, llama, TENSOR, tmp_path)
    assert (tmp_path / "checkpoints/step_3.partial/__1_0.distcp").exists()
    for after, state in zip(
        wholes(run_ranks(2, resume, llama, TENSOR, tmp_path)), before, strict=True
    ):
        assert_equal_tensors(after, state)
    assert not (tmp_path / "checkpoints/step_3.partial").exists()


def start(rank: int, folder: Path, dims: ParallelDims, path: Path) -> Boxes:
    policy, _ = start_policy(rank, folder, dims, *GIVEN, f"lora.adapter_path={path}")
    return adapters_of(policy)


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory) -> Path:
    """A PEFT folder that a run has exported."""
    run = tmp_path_factory.mktemp("run")
    run_ranks(1, train, llama, ONE, run)
    return run / "hf"


def test_starting_adapter_loads_another_runs_folder_at_any_layout(llama, trained):
    found = whole(run_ranks(4, start, llama, layout("tp2 pp2"), trained))
    stored = load_file(trained / "adapter_model.safetensors")
    assert_equal_tensors(found, stored)
    assert any(values.any() for name, values in stored.items() if ".lora_B." in name)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"r": 4}, "of rank 3, but lora.r is 4: set lora.r=3"),
        ({"lora_alpha": 9.0}, "lora.lora_alpha 9 gives 3: set lora.lora_alpha=6"),
        (
            {"exclude_modules": ("k_proj",)},
            r"such as model.layers.0.self_attn.k_proj: set lora.*exclude_modules=\[\]",
        ),
        (
            {"target_modules": ("q_proj",)},
            r"mlp.down_proj: set lora.target_modules=\[.*down_proj\]$",
        ),
    ],
    ids=["r", "lora_alpha", "exclude_modules", "target_modules"],
)
def test_starting_adapter_of_other_options_is_refused(llama, trained, given, error):
    lora = LoraConfig(**{"r": 3, "lora_alpha": 6.0, "adapter_path": trained} | given)
    with pytest.raises(ValueError, match=error):
        starting_adapter(lora, read_shape(llama))


def test_starting_adapter_advises_nothing_that_options_cannot_say(llama, tmp_path):
    shape = read_shape(llama)
    module = "model.layers.0.self_attn.q_proj"  # no other layer, as its config says
    tensors = adapter_tensors([module], 3, hf_tensors(shape))
    values = {name: torch.ones(size) for name, size in tensors.items()}
    save_file(values, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [module]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    lora = LoraConfig(r=3, lora_alpha=6.0, adapter_path=tmp_path, target_modules=("q_proj",))
    error = r"such as model\.layers\.1\.self_attn\.q_proj: no lora.target_modules .* merge the ad"
    with pytest.raises(ValueError, match=error):
        starting_adapter(lora, shape)


def test_export_is_a_folder_that_peft_loads(llama, trained):
    peft = pytest.importorskip("peft")
    sequences = random_sequences(LENGTHS)
    prompts = [s.tokens[: s.num_prompt_tokens].tolist() for s in sequences]
    completions = [s.tokens[s.num_prompt_tokens :].tolist() for s in sequences]
    model = peft.PeftModel.from_pretrained(load_oracle(llama), trained).double()
    with torch.no_grad():
        theirs = oracle_logprobs(model, prompts, completions)
    ours, *_ = oracle(llama, load_file(trained / "adapter_model.safetensors"), SCALE)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.long
def test_export_of_a_text_tower_fits_transformers_whole_model(tmp_path):
    peft = pytest.importorskip("peft")
    folder, hf = tiny_multimodal(tmp_path / "model", "qwen2_5_vl"), tmp_path / "hf"
    run_ranks(2, train, folder, STAGES, tmp_path)
    stored = load_file(hf / "adapter_model.safetensors")
    whole_model = AutoModelForImageTextToText.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(whole_model, hf)
    assert_equal_tensors(peft.get_peft_model_state_dict(model), stored)
    merge_adapter(folder, hf, tmp_path / "ours")
    model.merge_and_unload().save_pretrained(tmp_path / "peft")
    assert verify_weights(tmp_path / "ours", tmp_path / "peft", tolerance=1e-6) == []
    changed = {each.tensor for each in verify_weights(tmp_path / "ours", folder)}
    assert len(changed) == len(stored) / 2
    found = whole(run_ranks(1, start, folder, ONE, hf))
    assert_equal_tensors({tensor_in_whole(name): each for name, each in found.items()}, stored)


# Each layer, in float64.


def compare_in_float64(rank: int, folder: Path, *overrides: str) -> dict[str, float]:
    """The largest error of each linear layer's output and gradients, against the definition."""
    policy, _ = start_policy(rank, folder, ONE, *overrides)
    set_b(policy)
    errors = {}
    for name, adapter in policy.adapters.modules.items():
        number, _, path = name.partition(".")
        chunk = unwrapped(policy.chunks[int(number)])
        module = chunk.get_submodule(path.removesuffix(".weight")).double()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(5, 1, module.weight.shape[1], generator=generator, dtype=torch.float64)
        x.requires_grad_()
        low, weight = adapter.rank, module.weight.detach()
        a, b = (each.detach().clone().requires_grad_() for each in (adapter.a, adapter.b))
        change = torch.zeros_like(weight)
        row = 0
        for number, part in enumerate(adapter.target.parts):
            rows = b[row : row + len(part.rows)]
            row += len(part.rows)
            product = rows @ a[number * low : (number + 1) * low]
            change = change.index_add(0, torch.tensor(part.rows), product)
        expected = x @ (weight + adapter.scale * change).T
        found, apart = module(x)
        if module.bias is not None and apart is None:  # elsewhere the caller adds it
            expected = expected + module.bias
        seed = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        ours = torch.autograd.grad(found, (adapter.a, adapter.b, x), seed)
        theirs = torch.autograd.grad(expected, (a, b, x), seed)
        pairs = [(found, expected), *zip(ours, theirs, strict=True)]
        errors[name] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return errors


@pytest.mark.parametrize("family", TARGETS)
def test_adapter_of_each_layer_is_exact_in_float64(tmp_path, family):
    folder = tiny_model(tmp_path, family, tied=family == "llama", num_hidden_layers=4)
    (errors,) = run_ranks(1, compare_in_float64, folder, *options(family))
    assert len(errors) >= 8 and max(errors.values()) < 1e-10, errors


def broken(rank: int, folder: Path) -> str:
    policy, groups = start_policy(rank, folder, ONE, *GIVEN)
    accumulate(policy, groups, pack_all(LENGTHS, ONE))
    policy.adapters.parameters()["0.decoder.layers.1.mlp.linear_fc1.lora.b"].main_grad[-1] = (
        torch.nan
    )
    return name_nonfinite(policy, [], torch.device("cpu"))


def test_name_nonfinite_names_an_adapter(llama):
    (message,) = run_ranks(1, broken, llama)
    assert "the gradient of base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in message


# Inputs: shared prompts, layers with a norm, a base in FP8.


def step_of_each(
    rank: int, configs: dict[str, Config], experience: OffPolicy
) -> dict[str, tuple[int, float, Boxes]]:
    """Number of tokens, loss and gradients by config."""
    setup_device(rank)
    found, groups = {}, init_groups(TENSOR)
    for name, cfg in configs.items():
        policy = build_policy(cfg, read_shape(cfg.model.path), groups)
        set_b(policy)
        batches = batches_of(policy, experience, cfg, groups)
        metrics = accumulate_gradient(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), BETA)
        tokens, loss = sum(len(each.tokens) for each in batches), sum(map(float, metrics.losses))
        found[name] = tokens, loss, gradient_boxes(policy)
    return found


@pytest.mark.long
def test_shared_prompts_change_neither_loss_nor_gradients_of_adapters(tmp_path):
    case = Case(tiny_model(tmp_path, "llama", tied=True), {}, {23: 4, 1: 2, 2: 2, 40: 4})
    recipe = {"loss_type": "dapo", **CLIPS}
    configs = {
        flag: config(
            case.folder, TENSOR, recipe, BUDGETS[-1], *GIVEN, f"grpo.shared_prompts={flag}"
        )
        for flag in ("true", "false")
    }
    ranks = run_ranks(2, step_of_each, configs, case.experience())
    for rank in ranks:
        (fewer, loss, _), (tokens, expected, _) = rank["true"], rank["false"]
        assert fewer < 0.9 * tokens
        assert loss == pytest.approx(expected, rel=1e-5)
    shared, gradients = (whole([rank[flag][2] for rank in ranks]) for flag in ("true", "false"))
    for name, gradient in gradients.items():
        assert float((shared[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def logprobs_of_fused(rank: int, folder: Path) -> list[dict[int, Tensor]]:
    """Log-probabilities before and after norms are fused into layers, as in Transformer Engine."""
    policy, groups = start_policy(rank, folder, ONE, *options("gemma3_text"))
    set_b(policy)
    batches = pack_all(LENGTHS, ONE)
    found = [logprobs_of(policy, groups, batches)]
    for layer in unwrapped(policy.chunks[0]).decoder.layers:
        norm, qkv = layer.input_layernorm, layer.self_attention.linear_qkv
        layer.input_layernorm = IdentityOp()
        qkv.layer_norm_weight, qkv.eps = norm.weight, norm.eps
        qkv.zero_centered_gamma = norm.is_zero_centered
        qkv.forward = lambda x, norm=norm, multiply=qkv.forward: multiply(norm(x))
    return [*found, logprobs_of(policy, groups, batches)]


def test_adapters_of_layers_with_a_norm_multiply_what_it_returns(tmp_path):
    """A stored norm weight w multiplies by 1 + w."""
    folder = tiny_model(tmp_path, "gemma3_text")
    ((apart, fused),) = run_ranks(1, logprobs_of_fused, folder)
    assert all(torch.equal(fused[index], logprobs) for index, logprobs in apart.items())


def numbers(rank: int, folder: Path) -> tuple[str, dict[int, Tensor], Boxes]:
    """Digest of the base, log-probabilities, and the adapters after a step."""
    policy, groups = start_policy(rank, folder, TENSOR, *GIVEN)
    set_b(policy)
    logprobs = logprobs_of(policy, groups, pack_all(LENGTHS, TENSOR))
    take_step(policy, groups)
    return policy.adapters.base, logprobs, adapters_of(policy)


@pytest.mark.long
def test_base_in_fp8_is_its_dequantised_copy(tmp_path):
    """Tensor ranks cut inside FP8 blocks."""
    form = FORMATS["DeepSeek"]
    quantized = quantized_copy(tiny_model(tmp_path / "model", "llama"), tmp_path / "fp8", form)
    plain = dequantized_copy(quantized, tmp_path / "plain", form)
    found, expected = (run_ranks(2, numbers, folder) for folder in (quantized, plain))
    for (base, ours, _), (own_base, theirs, _) in zip(found, expected, strict=True):
        assert base == own_base
        assert_equal_tensors(ours, theirs)
    assert_equal_tensors(*(whole([boxes for *_, boxes in each]) for each in (found, expected)))


# The reference that follows a policy: the base with a copy of its adapters.

FOLLOWS = (*GIVEN, "grpo.sync_ref_model=true", "grpo.ref_model_sync_steps=2")
HALF = (*FOLLOWS, "model.dtype=bfloat16")


def start_both(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[Policy, Reference, Groups]:
    policy, groups = start_policy(rank, folder, dims, *overrides)
    set_b(policy)
    return policy, reference_of(policy, tiny_config(folder, dims, *overrides), groups), groups


def follow(rank: int, folder: Path, alpha: float) -> dict[str, Any]:
    """The adapters of four steps, and what both models compute after them."""
    option = f"grpo.ref_model_mixup_alpha={alpha}"
    policy, reference, groups = start_both(rank, folder, TENSOR, *FOLLOWS, option)
    values = [adapters_of(policy)]
    for step in range(1, 5):
        take_step(policy, groups)
        reference.follow(policy, step)
        values.append(adapters_of(policy))
    batches = pack_all(LENGTHS, TENSOR)
    return {
        "values": values,
        "reference": logprobs_of(reference, groups, batches),
        "policy": logprobs_of(policy, groups, batches),
    }


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_reference_computes_with_the_mixture_of_every_second_step(llama, alpha):
    ranks = run_ranks(2, follow, llama, alpha)
    first, _, second, _, last = wholes([rank["values"] for rank in ranks])
    mixed = {name: values.double() for name, values in first.items()}
    for trained in (second, last):
        mixed = {name: alpha * trained[name] + (1 - alpha) * mixed[name] for name in mixed}
    for model, values in (("reference", mixed), ("policy", last)):
        expected, base, *_ = oracle(llama, values, SCALE)
        assert max((a - b).abs().max() for a, b in zip(expected, base, strict=True)) > 1e-2
        check_logprobs([rank[model] for rank in ranks], expected)


def state(policy: Policy, reference: Reference) -> list[Boxes]:
    """Adapters of the policy and of the reference."""
    return [adapters_of(policy), boxes_of(policy.adapters, reference.averaged_weights)]


def two_steps(policy: Policy, reference: Reference, groups: Groups, first: int) -> list[Boxes]:
    for step in (first, first + 1):
        take_step(policy, groups)
        reference.follow(policy, step)
    return state(policy, reference)


def save(rank: int, folder: Path, dims: ParallelDims, run: Path) -> list[Boxes]:
    """Adapters of both at the save, and two steps later."""
    policy, reference, groups = start_both(rank, folder, dims, *HALF)
    averaged = reference.averaged_weights.values()
    assert {each.dtype for each in averaged} == {torch.float32}
    planned = state_bytes(tiny_config(folder, dims, *HALF), policy.shape, rank).reference
    assert planned == sum(each.nbytes for each in averaged)
    saved = two_steps(policy, reference, groups, 1)
    checkpoints = checkpoints_of(run, policy, folder, dims, reference=reference)
    checkpoints.save(TrainerState(step=2), {})
    checkpoints.wait()
    return [*saved, *two_steps(policy, reference, groups, 3)]


def load(rank: int, folder: Path, dims: ParallelDims, run: Path) -> list[Boxes]:
    policy, reference, groups = start_both(rank, folder, dims, *HALF)
    assert checkpoints_of(run, policy, folder, dims, reference=reference).load().step == 2
    return [*state(policy, reference), *two_steps(policy, reference, groups, 3)]


@pytest.mark.long
def test_reference_resumes_with_the_same_bits_and_over_layouts(llama, tmp_path):
    saved = wholes(run_ranks(2, save, llama, TENSOR, tmp_path))
    assert any(not torch.equal(values, saved[3][name]) for name, values in saved[1].items())
    loaded = wholes(run_ranks(2, load, llama, TENSOR, tmp_path))
    elsewhere = wholes(run_ranks(2, load, llama, STAGES, tmp_path))
    for found, expected in zip([*loaded, *elsewhere[:2]], [*saved, *saved[:2]], strict=True):
        assert_equal_tensors(found, expected)
    keys = read_chunks(tmp_path / "checkpoints/step_2").shapes.keys()
    assert {REFERENCE + name for name in saved[1]} == {x for x in keys if x.startswith(REFERENCE)}
