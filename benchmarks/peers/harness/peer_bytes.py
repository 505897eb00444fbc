"""Bytes that an engine worker receives from us, and would receive if vLLM itself moved the weights.

Computed from configs, without vLLM, by the rules of its release 0.32 for unquantised models on
engines without pipeline stages, the only kind that we start.
"""

import json
import tempfile
from math import prod
from pathlib import Path

from checkpoint_convert import ModelShape, hf_tensors, read_shape
from checkpoint_convert.vllm import EngineDims, engine_layouts
from parallel import Layout

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA_8B = LLAMA | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
}
LLAMA_70B = LLAMA | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}


def nccl_elements(shape: ModelShape) -> dict[str, int]:
    """Elements of each tensor of the weight files that a worker receives with vLLM's `nccl`.

    One trainer rank broadcasts all tensors whole, with or without packed buffers.
    """
    return {name: prod(size) for name, size in hf_tensors(shape).items()}


def m2n_elements(shape: ModelShape, worker: Layout) -> dict[str, int]:
    """Elements of each tensor with vLLM's `nccl_m2n`, for the layout `worker` (all are alike).

    A worker receives only its share of a tensor if it has a parameter of the same name that the
    loader of a linear layer fills: the output projection of attention, `down_proj` of a dense MLP,
    and the up-projections of latents. Other tensors arrive whole and go through vLLM's loading:
    fused ones (QKV, gate and up, experts), and embedding and head, since their loader pads the
    vocabulary. This holds for `dst_mesh_dims` of (engines, their tensor size); with vLLM's default,
    every split tensor arrives whole.
    """
    return {
        name: prod(size if name in VOCABULARY else worker.shapes.get(name, size))
        for name, size in hf_tensors(shape).items()
    }


def print_peers() -> None:
    """Print the gigabytes that a worker receives at TP8 from us and from vLLM's own backends."""
    print(f"\n{'GB per worker, TP8':24}{'own shard':>12}{'vLLM nccl':>12}{'nccl_m2n':>12}")
    for name, config in {"Llama-3.1-8B": LLAMA_8B, "Llama-3.1-70B": LLAMA_70B}.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            shape = read_shape(folder)
        worker = engine_layouts(shape, EngineDims(tensor=8))[0]
        elements = [
            sum(piece.box.num_elements for piece in worker.pieces),
            sum(nccl_elements(shape).values()),
            sum(m2n_elements(shape, worker).values()),
        ]
        print(f"{name:24}" + "".join(f"{2 * count / 1e9:12.2f}" for count in elements))


if __name__ == "__main__":
    print_peers()
