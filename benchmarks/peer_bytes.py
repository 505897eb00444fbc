"""Bytes that a worker receives at TP8 from us and from vLLM's own backends, from configs alone."""

import json
import tempfile
from pathlib import Path

from checkpoint_convert import read_shape
from checkpoint_convert.vllm import EngineDims, engine_layouts
from megatron_grpo.planning.peer_traffic import m2n_elements, nccl_elements

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


def print_peers() -> None:
    """Print the gigabytes that a worker receives from us and from vLLM's own backends."""
    print(f"\n{'GB per worker, TP8':24}{'own shard':>12}{'vLLM nccl':>12}{'nccl_m2n':>12}")
    for name, config in {"Llama-3.1-8B": LLAMA_8B, "Llama-3.1-70B": LLAMA_70B}.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            shape = read_shape(folder)
        worker = engine_layouts(shape, EngineDims(tensor=8))[0]
        elements = [
            sum(piece.box.num_elements for piece in worker.pieces),
            sum(nccl_elements(shape).values()),
            sum(m2n_elements(shape, worker).values()),
        ]
        print(f"{name:24}" + "".join(f"{2 * count / 1e9:12.2f}" for count in elements))
