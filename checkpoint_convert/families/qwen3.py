"""Qwen3, dense: Llama with an RMS norm on every query and key head, and an explicit head size."""

from dataclasses import replace

from checkpoint_convert.families.description import Norms
from checkpoint_convert.families.qwen2 import QWEN2

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    defaults={**QWEN2.defaults, "head_dim": 128},
    # transformers puts `attention_bias` on the output projection too.
    required={"attention_bias": False},
    attention_bias=False,
    norms=Norms(of_heads=True),
)
