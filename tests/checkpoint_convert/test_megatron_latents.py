"""Imports of DeepSeek-V3 are checkpoints of Megatron-Core's own latent attention, too.

The trainer has a latent attention of its own. Megatron-Core's needs Transformer Engine for two
things alone, which are done here by torch: attention to values that are smaller than keys, and the
names of fused norms.
"""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from checkpoint_convert.hf_to_megatron import import_checkpoint
from helpers.models import tiny_model
from helpers.ranks import run_ranks
from megatron_grpo.policy.releases import IS_OLD
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

TOKENS = torch.arange(250).reshape(2, 125)


class CausalAttention(torch.nn.Module):
    def __init__(self, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        """[tokens, samples, heads, dim] each, as Megatron-Core has them."""
        heads = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        out = scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def config_of(shape):
    latent, moe = shape.latent, shape.moe
    return MLATransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        ffn_hidden_size=shape.intermediate_size,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.rank,
        qk_head_dim=shape.head_dim - latent.rotary_dim,
        qk_pos_emb_head_dim=latent.rotary_dim,
        v_head_dim=latent.value_dim,
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=shape.rope_theta,
        rotary_percent=1.0,
        num_moe_experts=moe.num_experts,
        moe_router_topk=moe.experts_per_token,
        moe_layer_freq=[int(i >= moe.num_dense_layers) for i in range(shape.num_layers)],
        moe_ffn_hidden_size=moe.intermediate_size,
        moe_shared_expert_intermediate_size=moe.shared_intermediate_size,
        moe_router_score_function=moe.score_function,
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=moe.num_groups,
        moe_router_group_topk=moe.groups_per_token,
        moe_router_topk_scaling_factor=moe.weight_scale,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )


def logits_of_import(rank, shape, imported):
    """What Megatron-Core's model computes for `TOKENS` with the weights in a checkpoint."""
    # Without Transformer Engine, one is wrong and the other is not defined.
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None
    setup_device(rank)
    init_groups(ParallelDims())
    config = config_of(shape)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for index, layer in enumerate(spec.layer_specs):
        modules = layer.submodules
        modules.self_attention.submodules.core_attention = CausalAttention
        fused = {
            f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
            for x in ("q", "kv")
        }
        if index < shape.num_dense_layers:
            fused["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        modules.sharded_state_dict_keys_map = fused
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(imported)))
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        return model.eval()(TOKENS, positions, None)


# Without latents of queries, 0.19.2's own attention wants a norm that DeepSeek's models lack.
@pytest.mark.parametrize("query_rank", [24, None] if IS_OLD else [24])
def test_megatrons_own_latent_attention_computes_with_an_import_what_transformers_does(
    tmp_path, query_rank
):
    model = tiny_model(tmp_path / "model", "deepseek_v3", q_lora_rank=query_rank)
    import_checkpoint(model, tmp_path / "megatron", ParallelDims(tensor=2))
    (logits,) = run_ranks(1, logits_of_import, read_shape(model), tmp_path / "megatron")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model)(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
