"""Adapters against a plain formulation in float64: W + s B A on a model of transformers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.formats.torch_dist import read_chunks
from checkpoint_convert.merge import merge_adapter
from checkpoint_convert.peft import adapter_tensors, tensor_in_whole
from checkpoint_convert.verify import verify_weights
from helpers.models.tiny import tiny_model
from helpers.models.towers import tiny_multimodal
from helpers.oracle.adapters import (
    TARGETS,
    Boxes,
    boxes_of,
    gathered_gradients,
    options,
    oracle,
    set_b,
    take_step,
    whole,
)
from helpers.oracle.grpo import oracle_logprobs
from helpers.oracle.policies import (
    LENGTHS,
    accumulate,
    checkpoints_of,
    layout_name,
    load_oracle,
    logprobs_of,
    pack_all,
    random_sequences,
    save_checkpoint,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints import manifest
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.lora_targets import starting_adapter
from megatron_grpo.policy.model import unwrapped
from megatron_grpo.policy.optimizer import gradient_norm
from megatron_grpo.policy.reference import reference_of
from megatron_grpo.policy.skipped_steps import name_nonfinite
from parallel import ParallelDims

DENSE = [
    ParallelDims(),
    ParallelDims(tensor=4),  # more ranks than key-value heads
    ParallelDims(pipeline=2, data=2, num_layers_in_last_pipeline_stage=1),
    ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2, context=2),
]
EXPERTS = [ParallelDims(tensor=2, expert_tensor=1, expert=2), ParallelDims(data=2, expert=2)]
CASES = [
    *(
        pytest.param("llama", dims, marks=[pytest.mark.slow] if dims.tensor == 4 else [])
        for dims in DENSE
    ),
    ("phi3", ParallelDims(tensor=2)),  # one adapter of queries, keys and values together
    ("qwen3_moe", EXPERTS[1]),
    ("deepseek_v3", EXPERTS[0]),
    ("deepseek_v32", EXPERTS[0]),  # indexers, which have none
    ("gpt_oss", EXPERTS[0]),  # biases, beside which adapters are
    ("qwen3_5_text", ParallelDims(tensor=2, context=2)),  # linear attention
    *(
        pytest.param(family, dims, marks=pytest.mark.slow)
        for family, dims in (("qwen3_moe", EXPERTS[0]), ("deepseek_v3", EXPERTS[1]))
    ),
]
RECOMPUTED = [
    f"model.megatron.recompute_{name}"
    for name in ("granularity=full", "method=uniform", "num_layers=1")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        family: tiny_model(
            tmp_path_factory.mktemp(family), family, tied=family == "llama", num_hidden_layers=4
        )
        for family in TARGETS
    }


def numbers(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> dict[str, Any]:
    policy, groups = start_policy(rank, folder, dims, *overrides)
    set_b(policy)
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    reference = reference_of(policy, tiny_config(folder, dims, *overrides), groups)
    found: dict[str, Any] = {"reference": logprobs_of(reference, groups, share)}
    found["logprobs"] = logprobs_of(policy, groups, share)
    accumulate(policy, groups, share)
    found["norm"] = gradient_norm(policy.optimizer)
    found["gradients"] = boxes_of(policy, gathered_gradients(policy))
    found["values"] = boxes_of(policy, policy.adapters.parameters())
    served = policy.served(LoraConfig(sync="merged"))
    found["served"] = [
        (piece.tensor, piece.box, served[piece.local].detach()[piece.local_box.slices].clone())
        for piece in policy.layout.pieces
        if not piece.is_replica
    ]
    frozen = [*policy.parameters().values()]
    assert not any(p.requires_grad or hasattr(p, "main_grad") for p in frozen)
    states = [p for part in policy.optimizer.chained_optimizers for p in part.get_parameters()]
    found["trained"] = sum(p.numel() for p in states)
    found["base"] = policy.adapters.base
    return found


@pytest.mark.parametrize(
    ("family", "dims"), CASES, ids=lambda v: v if isinstance(v, str) else layout_name(v)
)
def test_everything_equals_a_plain_formulation(folders, family, dims):
    overrides = options(family) + (RECOMPUTED if dims.pipeline > 1 else [])
    ranks = run_ranks(dims.world_size, numbers, folders[family], dims, *overrides)
    values = whole([rank["values"] for rank in ranks])
    logprobs, plain, gradients, merged = oracle(folders[family], values, scale=2.0)
    assert max((a - b).abs().max() for a, b in zip(logprobs, plain, strict=True)) > 1e-2
    for key, expected in {"logprobs": logprobs, "reference": plain}.items():
        seen = [item for rank in ranks for item in rank[key].items()]
        assert {index for index, _ in seen} == set(range(len(expected)))
        for index, found in seen:
            torch.testing.assert_close(found.double(), expected[index], atol=1e-5, rtol=0)
    found = whole([rank["gradients"] for rank in ranks])
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-5, name
    norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
    assert [rank["norm"] for rank in ranks] == pytest.approx([norm] * len(ranks), rel=1e-5)
    served = whole([rank["served"] for rank in ranks])
    for name, weight in merged.items():
        torch.testing.assert_close(served[name].double(), weight.detach(), atol=1e-6, rtol=1e-6)
    one = run_ranks(1, numbers, folders[family], ParallelDims(), *options(family))[0]
    same = whole([one["served"]])
    assert all(torch.equal(values, same[name]) for name, values in served.items())
    assert {rank["base"] for rank in ranks} == {one["base"]}


def train(rank: int, folder: Path, dims: ParallelDims, run: Path, *overrides: str) -> list[Boxes]:
    """Adapters after two steps, which are saved and exported, and after one more."""
    policy, groups = start_policy(rank, folder, dims, *overrides)
    take_step(policy, groups)
    take_step(policy, groups)
    save_checkpoint(run, 2, policy, folder, dims)
    export_model(run / "hf", policy, tiny_config(folder, dims, *overrides), groups)
    saved = boxes_of(policy, policy.adapters.parameters())
    take_step(policy, groups)
    return [saved, boxes_of(policy, policy.adapters.parameters())]


def resume(rank: int, folder: Path, dims: ParallelDims, run: Path, *overrides: str) -> list[Boxes]:
    policy, groups = start_policy(rank, folder, dims, *overrides)
    assert checkpoints_of(run, policy, folder, dims).load().step == 2
    export_model(run / f"hf {dims}", policy, tiny_config(folder, dims, *overrides), groups)
    loaded = boxes_of(policy, policy.adapters.parameters())
    take_step(policy, groups)
    return [loaded, boxes_of(policy, policy.adapters.parameters())]


@pytest.mark.long
def test_a_run_resumes_with_the_same_bits_and_over_layouts(folders, tmp_path):
    folder, dims = folders["llama"], ParallelDims(tensor=2, data=2)
    given = options("llama")
    saved, later = map(list, zip(*run_ranks(4, train, folder, dims, tmp_path, *given), strict=True))
    same = run_ranks(4, resume, folder, dims, tmp_path, *given)
    for found, expected in zip(zip(*same, strict=True), (saved, later), strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(a[2], b[2]) for a, b in zip(ours, theirs, strict=True))
    other = ParallelDims(pipeline=2)
    loaded, after = map(
        list, zip(*run_ranks(2, resume, folder, other, tmp_path, *given), strict=True)
    )
    expected = whole(saved)
    assert all(torch.equal(values, expected[name]) for name, values in whole(loaded).items())
    for name, values in whole(after).items():
        torch.testing.assert_close(values, whole(later)[name], atol=1e-5, rtol=1e-4)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("hf", f"hf {other}")]
    assert files[0].read_bytes() == files[1].read_bytes()
    stored = load_file(files[0])
    assert all(torch.equal(values, expected[name]) for name, values in stored.items())
    keys = read_chunks(tmp_path / "checkpoints/step_2").shapes
    states = (
        "",
        "optimizer.state.param.",
        "optimizer.state.exp_avg.",
        "optimizer.state.exp_avg_sq.",
    )
    assert keys.keys() == {state + name for state in states for name in stored}


def die_in_the_save(
    rank: int, folder: Path, dims: ParallelDims, run: Path, *overrides: str
) -> None:
    """A step after what `train` has saved, one rank is killed as it has written its file."""
    policy, groups = start_policy(rank, folder, dims, *overrides)
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
def test_a_rank_that_is_killed_in_a_save_leaves_the_adapters_before(folders, tmp_path):
    folder, dims, given = folders["llama"], ParallelDims(tensor=2), options("llama")
    before = run_ranks(2, train, folder, dims, tmp_path, *given)
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(2, die_in_the_save, folder, dims, tmp_path, *given)
    assert (tmp_path / "checkpoints/step_3.partial/__1_0.distcp").exists()
    after = run_ranks(2, resume, folder, dims, tmp_path, *given)
    for found, expected in zip(after, before, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(a[2], b[2]) for a, b in zip(ours, theirs, strict=True))
    assert not (tmp_path / "checkpoints/step_3.partial").exists()


def start(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> Boxes:
    policy, _ = start_policy(rank, folder, dims, *overrides)
    return boxes_of(policy, policy.adapters.parameters())


def test_a_run_starts_from_a_folder_of_another_at_any_layout(folders, tmp_path):
    folder, given = folders["llama"], options("llama")
    run_ranks(1, train, folder, ParallelDims(), tmp_path, *given)
    path, dims = tmp_path / "hf", ParallelDims(tensor=2, pipeline=2)
    found = whole(run_ranks(4, start, folder, dims, *given, f"lora.adapter_path={path}"))
    stored = load_file(path / "adapter_model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(values, stored[name]) for name, values in found.items())
    assert any(values.any() for name, values in stored.items() if ".lora_B." in name)
    for given, told in (
        ({"r": 4}, "of rank 3, and lora.r is 4: set lora.r=3"),
        ({"lora_alpha": 9.0}, "that of lora.lora_alpha 9 is 3: set lora.lora_alpha=6"),
        (
            {"exclude_modules": ("k_proj",)},
            r"such as model.layers.0.self_attn.k_proj: set lora.*exclude_modules=\[\]",
        ),
        (
            {"target_modules": ("q_proj",)},
            r"mlp.down_proj: set lora.target_modules=\[.*down_proj\]$",
        ),
    ):
        lora = LoraConfig(**{"r": 3, "lora_alpha": 6.0, "adapter_path": path} | given)
        with pytest.raises(ValueError, match=told):
            starting_adapter(lora, read_shape(folder))


def test_what_target_modules_cannot_say_of_an_adapter_is_not_advised(folders, tmp_path):
    shape = read_shape(folders["llama"])
    module = "model.layers.0.self_attn.q_proj"  # and no other layer, as its config says
    tensors = adapter_tensors([module], 3, hf_tensors(shape))
    values = {name: torch.ones(size) for name, size in tensors.items()}
    save_file(values, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [module]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    lora = LoraConfig(r=3, lora_alpha=6.0, adapter_path=tmp_path, target_modules=("q_proj",))
    told = r"such as model\.layers\.1\.self_attn\.q_proj: no lora.target_modules .* merge them"
    with pytest.raises(ValueError, match=told):
        starting_adapter(lora, shape)


def test_peft_loads_the_folder(folders, tmp_path):
    peft = pytest.importorskip("peft")
    given = options("llama")
    run_ranks(1, train, folders["llama"], ParallelDims(), tmp_path, *given)
    sequences = random_sequences(LENGTHS)
    prompts = [s.tokens[: s.num_prompt_tokens].tolist() for s in sequences]
    completions = [s.tokens[s.num_prompt_tokens :].tolist() for s in sequences]
    model = peft.PeftModel.from_pretrained(load_oracle(folders["llama"]), tmp_path / "hf").double()
    with torch.no_grad():
        theirs = oracle_logprobs(model, prompts, completions)
    ours, *_ = oracle(folders["llama"], load_file(tmp_path / "hf/adapter_model.safetensors"), 2.0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.long
def test_the_folder_of_a_text_tower_fits_transformers_whole_model(tmp_path):
    peft = pytest.importorskip("peft")
    folder, hf = tiny_multimodal(tmp_path / "model", "qwen2_5_vl"), tmp_path / "hf"
    given = options("llama")
    run_ranks(2, train, folder, ParallelDims(pipeline=2), tmp_path, *given)
    stored = load_file(hf / "adapter_model.safetensors")
    whole_model = AutoModelForImageTextToText.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(whole_model, hf)
    loaded = peft.get_peft_model_state_dict(model)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(values, stored[name]) for name, values in loaded.items())
    merge_adapter(folder, hf, tmp_path / "ours")
    model.merge_and_unload().save_pretrained(tmp_path / "peft")
    assert verify_weights(tmp_path / "ours", tmp_path / "peft", tolerance=1e-6) == []
    changed = {each.tensor for each in verify_weights(tmp_path / "ours", folder)}
    assert len(changed) == len(stored) / 2
    found = whole(run_ranks(1, start, folder, ParallelDims(), *given, f"lora.adapter_path={hf}"))
    assert {tensor_in_whole(name) for name in found} == stored.keys()
    assert all(torch.equal(values, stored[tensor_in_whole(n)]) for n, values in found.items())


def compare_in_float64(rank: int, folder: Path, *overrides: str) -> dict[str, float]:
    """The largest error of each linear layer's output and gradients, against the definition."""
    policy, _ = start_policy(rank, folder, ParallelDims(), *overrides)
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
        if module.bias is not None and apart is None:  # else whoever calls the layer adds it
            expected = expected + module.bias
        seed = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        ours = torch.autograd.grad(found, (adapter.a, adapter.b, x), seed)
        theirs = torch.autograd.grad(expected, (a, b, x), seed)
        pairs = [(found, expected), *zip(ours, theirs, strict=True)]
        errors[name] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return errors


@pytest.mark.parametrize("family", TARGETS)
def test_each_layer_is_exact_in_float64(folders, family):
    (errors,) = run_ranks(1, compare_in_float64, folders[family], *options(family))
    assert len(errors) >= 8 and max(errors.values()) < 1e-10, errors


def broken(rank: int, folder: Path, *overrides: str) -> str:
    policy, groups = start_policy(rank, folder, ParallelDims(), *overrides)
    accumulate(policy, groups, pack_all(LENGTHS, ParallelDims()))
    policy.adapters.parameters()["0.decoder.layers.1.mlp.linear_fc1.lora.b"].main_grad[-1] = (
        torch.nan
    )
    return name_nonfinite(policy, [], torch.device("cpu"))


def test_a_broken_gradient_is_named(folders):
    (told,) = run_ranks(1, broken, folders["llama"], *options("llama"))
    assert "the gradient of base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in told
