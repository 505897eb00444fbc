"""Quantises a model with fixed scales of activations, by NVIDIA's ModelOpt.

`checkpoint-convert quantize`. ModelOpt calibrates whole modules in one process. Exports of
`megatron_to_hf.py` need neither: a rank quantises its part of a matrix, and engines find the scales
of activations as they compute.
"""

import json
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint_convert.folder import read_json
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.hf_config import has_other_towers, read_scheme, read_shape
from checkpoint_convert.hf_folder import check_weights
from checkpoint_convert.megatron import hf_tensors
from checkpoint_convert.megatron_to_hf import num_bytes_of, stored_tensors
from checkpoint_convert.new_folder import new_folder
from checkpoint_convert.peft import WEIGHT
from checkpoint_convert.quantized.model import QuantizedModel, quantized_model
from checkpoint_convert.sidecar import copy_sidecar_files, main_dtype
from checkpoint_convert.tokenizer import load_tokenizer
from checkpoint_convert.weights import open_weights

CONFIGS = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}
NUM_SAMPLES, MAX_TOKENS = 512, 2048


def quantize_folder(hf: Path, out: Path, scheme: Literal["fp8", "nvfp4"], calibrate: Path) -> None:
    """Write the model in `hf` as folder `out` in ModelOpt's format.

    `calibrate` has a JSON object per line, a `prompt` with its `completion`. Raises ValueError for
    a model of a kind that no test has seen an engine load.
    """
    shape = read_shape(hf)
    obstacles: dict[str, object] = {
        "experts, which vLLM 0.32 computes with such scales on GPUs alone (SUPPORTED_W_A in its "
        "cpu_moe.py), where they are untried: use `checkpoint-convert export --quantization`": (
            shape.moe
        ),
        "towers for images, which are untried: calibrate a model of text": has_other_towers(hf),
        "quantised weights: calibrate a copy by `checkpoint-convert import` and `export`": (
            read_scheme(hf)
        ),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ValueError(f"{hf} has {obstacle}")
    samples = _samples(hf, calibrate)
    with closing(open_weights(hf, shape)) as weights:
        dtypes = weights.dtypes
    dtype = main_dtype(hf_tensors(shape), dtypes)
    quantized = quantized_model("fp8_channel", shape, dtype)
    assert quantized is not None, "the scheme is not none"
    with new_folder(out, num_bytes_of(stored_tensors(shape, dtypes, quantized))) as folder:
        model = AutoModelForCausalLM.from_pretrained(hf, dtype=DTYPES[dtype], device_map="auto")
        mtq.quantize(model, CONFIGS[scheme], lambda model: _run(model, samples))
        _share_scales(model, quantized)
        export_hf_checkpoint(model, export_dir=folder)
        config = read_json(folder / "config.json")["quantization_config"]
        copy_sidecar_files(hf, folder, dtype, {"quantization_config": config})
        check_weights(folder, shape)


def _samples(hf: Path, calibrate: Path) -> list[Tensor]:
    """Tokens [1, length] of the last lines: a run's latest completions."""
    try:
        with calibrate.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in deque(lines, NUM_SAMPLES)]
        # The prompt has its special tokens already.
        texts = [row["prompt"] + row["completion"] for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        what = "is not JSON with a prompt and a completion in each line"
        raise ValueError(f"{calibrate} {what}: {error!r}") from None
    if not texts:
        raise ValueError(f"{calibrate} is empty: --calibrate needs prompts and completions")
    tokenizer = load_tokenizer(hf)
    return [
        tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :MAX_TOKENS]
        for text in texts
    ]


@torch.no_grad()
def _run(model: Any, samples: list[Tensor]) -> None:
    for tokens in samples:
        model(tokens.to(model.device))


def _share_scales(model: Any, quantized: QuantizedModel) -> None:
    """Give all parts of a fused matrix one scale: engines would round them again to the largest."""
    for names in {*quantized.fused.values()}:
        modules = [model.get_submodule(name.removesuffix(WEIGHT)) for name in names]
        largest = max(module.weight_quantizer.amax for module in modules)
        for module in modules:
            module.weight_quantizer.amax = largest
