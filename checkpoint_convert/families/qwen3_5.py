"""Qwen3.5, dense, such as Qwen3.5-9B: the text of a multimodal model, with Qwen3-Next's layers."""

from checkpoint_convert.families.description import Family
from checkpoint_convert.families.qwen3_next import LINEAR_DEFAULTS

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    defaults={
        **LINEAR_DEFAULTS,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "mtp_num_hidden_layers": 0,
    },
    # Only vLLM reads the last two.
    required={
        "attention_bias": False,
        "sliding_window": None,
        "attn_output_gate": True,
        "layer_scale": False,
    },
    qk_norm=True,
    zero_centered_norms=True,
    has_output_gate=True,
    linear="one by one",
    partial_rotary_factor=0.25,
    num_mtp_layers="mtp_num_hidden_layers",
)
