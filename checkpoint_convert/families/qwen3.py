"""Qwen3, dense: Llama with an RMS norm on every query and key head, and an explicit head size."""

from dataclasses import replace

from checkpoint_convert.families.description import Norms
from checkpoint_convert.families.engines import Engines, Vllm
from checkpoint_convert.families.qwen2 import QWEN2

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    required={},
    attention_bias="attention_bias",
    has_output_bias=True,
    norms=Norms(of_heads=True),
    engines=Engines(vllm=Vllm(has_mixed_windows=False, has_output_bias=False)),
)
