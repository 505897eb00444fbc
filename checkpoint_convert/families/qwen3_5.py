"""Qwen3.5, such as Qwen3.5-9B, or with experts Qwen3.5-35B-A3B: the text of a multimodal model,
with Qwen3-Next's layers."""

from dataclasses import replace

from checkpoint_convert.families.description import Experts, Family, Mtp
from checkpoint_convert.families.engines import Engines, Sglang
from checkpoint_convert.families.qwen3_next import LINEAR_DEFAULTS, QWEN3_NEXT, SGLANG_NAMES

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
    norms=QWEN3_NEXT.norms,
    has_output_gate=True,
    linear="one by one",
    rope=QWEN3_NEXT.rope,
    mtp=Mtp("mtp_num_hidden_layers", is_apart=True),
    engines=Engines(sglang=Sglang(names=SGLANG_NAMES)),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    defaults={
        **QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 512,  # no layer has a dense MLP
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    required={
        **QWEN3_5.required,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    experts=Experts(
        num_experts="num_experts",
        intermediate_size="moe_intermediate_size",
        normalize_topk=None,
        shared="shared_expert",
        shared_size="shared_expert_intermediate_size",
        has_shared_gate=True,
        stacks="joined",
        may_be_apart=True,
    ),
    engines=replace(QWEN3_5.engines, vllm=QWEN3_NEXT.engines.vllm),
)
