"""Folders that ModelOpt calibrated, in a real vLLM on a CPU: `make test-modelopt`."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.quantized.numbers import dequantized, quantized
from checkpoint_convert.tokenizer import load_tokenizer
from checkpoint_convert.weights import whole_tensors
from helpers.models.tiny import tiny_model
from parallel import ParallelDims

pytest.importorskip("modelopt", reason="make test-modelopt")

LARGEST = {"fp8": 448, "nvfp4": 448 * 6}
"""The largest number, times the largest scale of a block."""
ROWS = [{"prompt": f"What is {n} + {n}?", "completion": f" It is {2 * n}."} for n in range(20)]


def calibrated(model, out, scheme, rows):
    from checkpoint_convert.calibration import quantize_folder

    samples = out.with_suffix(".jsonl")
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quantize_folder(model, out, scheme, samples)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model by how it is stored; `rows` is our own export in FP8."""
    folder = tmp_path_factory.mktemp("calibrated")
    sizes = {"head_dim": 32, "intermediate_size": 128}
    import_checkpoint(
        tiny_model(folder / "made", "qwen3", **sizes), folder / "in", ParallelDims(), dtype="BF16"
    )
    export_checkpoint(folder / "in", folder / "plain")
    export_checkpoint(folder / "in", folder / "rows", quantization="fp8_channel")
    for scheme in LARGEST:
        calibrated(folder / "plain", folder / scheme, scheme, ROWS)
    return {name: folder / name for name in ("plain", "rows", *LARGEST)}


def linear_layers(model):
    return {n: m for n, m in model.model.named_modules(prefix="model") if hasattr(m, "in_features")}


@pytest.mark.parametrize("scheme", LARGEST)
def test_input_scales_are_the_largest_inputs_of_the_samples(folders, scheme):
    model = AutoModelForCausalLM.from_pretrained(folders["plain"])
    largest = {}

    def see(name, module, args):
        largest[name] = max(largest.get(name, 0.0), float(args[0].abs().max()))

    for name, module in linear_layers(model).items():
        module.register_forward_pre_hook(partial(see, name))
    tokenizer = load_tokenizer(folders["plain"])
    for row in ROWS:
        model(torch.tensor([tokenizer.encode(row["prompt"] + row["completion"])]))
    stored = load_file(folders[scheme] / "model.safetensors")
    found = {n: float(stored[f"{n}.input_scale"]) * LARGEST[scheme] for n in largest}
    assert len(found) == 14
    assert found == pytest.approx(largest, rel=1e-6)
    whole = "weight_scale" if scheme == "fp8" else "weight_scale_2"
    for fused in ("self_attn.q_proj", "self_attn.k_proj"), ("mlp.gate_proj", "mlp.up_proj"):
        first, second = (stored[f"model.layers.0.{name}.{whole}"] for name in fused)
        assert first == second, "vLLM would round one of them again"


def rounded(scheme, scale, module, args):
    """The inputs as an engine rounds them, with the fixed scale of a file."""
    x = args[0]
    if scheme == "fp8":
        number = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (number.float() * scale,)
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    number, of_blocks, _ = NVFP4QTensor.quantize(x, 16, None, scale)
    return (number.dequantize(scale=of_blocks, double_scale=scale, block_sizes={-1: 16}),)


def logprobs_of(folders, scheme, tokens):
    """Log-probabilities of `tokens` by torch, with the folder's weights and input scales."""
    model = AutoModelForCausalLM.from_pretrained(folders["plain"], dtype=torch.float32)
    model.load_state_dict(dict(whole_tensors(folders[scheme])))
    stored = load_file(folders[scheme] / "model.safetensors")
    for name, module in linear_layers(model).items():
        if scheme in LARGEST:
            scale = stored[f"{name}.input_scale"]
            module.register_forward_pre_hook(partial(rounded, scheme, scale))
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


def served_logprobs(folder, tokens):
    """The same by vLLM."""
    from vllm import LLM, SamplingParams

    options = {"max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True}
    engine = LLM(str(folder), dtype="bfloat16", **options)
    ask = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    [answer] = engine.generate([{"prompt_token_ids": tokens.tolist()}], ask)
    pairs = zip(tokens[1:].tolist(), answer.prompt_logprobs[1:], strict=True)
    return torch.tensor([at[token].logprob for token, at in pairs])


@pytest.mark.timeout(300)
def test_vllm_computes_with_the_weights_and_input_scales_of_a_folder(folders, monkeypatch):
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch
    from vllm.platforms import PlatformEnum

    # vLLM's own kernels by torch. Those for AMX leave inputs in bfloat16; NVFP4 has none on CPUs.
    own = [
        pytorch.PerTensorTorchFP8ScaledMMLinearKernel,
        pytorch.ChannelWiseTorchFP8ScaledMMLinearKernel,
    ]
    monkeypatch.setitem(kernels._POSSIBLE_FP8_KERNELS, PlatformEnum.CPU, own)
    monkeypatch.setitem(
        kernels._POSSIBLE_NVFP4_KERNELS, PlatformEnum.CPU, [EmulationNvFp4LinearKernel]
    )
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with these kernels
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }.items():
        monkeypatch.setenv(name, value)
    tokens = torch.randint(4, 250, (100,), generator=torch.Generator().manual_seed(5))
    served = {name: served_logprobs(folder, tokens) for name, folder in folders.items()}
    expected = {name: logprobs_of(folders, name, tokens) for name in folders}

    def gap(name, other):
        return float((served[name] - other).abs().mean())

    for name in folders:
        own, plain = gap(name, expected[name]), gap(name, expected["plain"])
        print(f"{name}: {plain:.3f} from the unquantised folder, {own:.3f} from its own numbers")
    assert gap("plain", expected["plain"]) < 0.02
    # The engine's bfloat16 turns some inputs to the other of two numbers of 8 or 4 bits.
    for scheme in LARGEST:
        assert gap(scheme, expected[scheme]) < 0.7 * gap(scheme, expected["plain"])
    assert gap("fp8", expected["plain"]) < 1.5 * gap("rows", expected["plain"])


def test_modelopt_reads_and_writes_our_nvfp4_as_we_do(folders, tmp_path):
    """Its quantisation-aware training, which no CPU computes, has the values that it writes."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    out = tmp_path / "nvfp4"
    export_checkpoint(folders["plain"].with_name("in"), out, quantization="nvfp4")
    stored, ours = load_file(out / "model.safetensors"), dict(whole_tensors(out))
    plain = load_file(folders["plain"] / "model.safetensors")
    names = [n.removesuffix("_packed") for n in stored if n.endswith("_packed")]
    assert len(names) == 14
    num_values = num_halfway = 0
    for name in names:
        packed = NVFP4QTensor(ours[name].shape, torch.bfloat16, stored[f"{name}_packed"])
        whole = 1 / stored[f"{name}_global_scale"]  # by which ModelOpt multiplies
        scales = {"scale": stored[f"{name}_scale"], "double_scale": whole}
        read = packed.dequantize(**scales, block_sizes={-1: 16})
        assert torch.equal(read, ours[name])
        assert (read - plain[name]).norm() < 0.15 * plain[name].norm()
        written, of_blocks, _ = NVFP4QTensor.quantize(plain[name], 16, None, whole[0])
        assert torch.equal(of_blocks, scales["scale"])
        # It multiplies by the scale of the matrix, we divide by the inverse: the last bit may
        # differ, and sends a weight halfway between two numbers to the other one.
        products = of_blocks.float() * whole
        numbers = quantized(plain[name], products, torch.uint8, (1, 16))
        theirs = written.dequantize(**scales, block_sizes={-1: 16})
        assert torch.equal(theirs, dequantized(numbers, products, (1, 16), (0, 0)).bfloat16())
        num_values, num_halfway = num_values + theirs.numel(), num_halfway + (theirs != read).sum()
    print(f"{num_halfway} of {num_values} weights are halfway, and ModelOpt's other number")
    assert num_halfway < 1e-3 * num_values


def test_other_models_and_files_without_completions_are_refused(folders, tmp_path):
    for rows, why in (
        ([], "empty"),
        ([{"prompt": "What?"}], "a prompt and a completion in each line"),
    ):
        with pytest.raises(ValueError, match=why):
            calibrated(folders["plain"], tmp_path / "out", "fp8", rows)
    mixture = tiny_model(tmp_path / "mixture", "qwen3_moe")
    for model, why in ((mixture, "experts.* cpu_moe"), (folders["rows"], "quantised weights: ")):
        with pytest.raises(ValueError, match=why):
            calibrated(model, tmp_path / "out", "fp8", ROWS)
    assert not (tmp_path / "out").exists()
