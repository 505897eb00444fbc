"""Imports of DeepSeek-V3 also load into Megatron-Core's own latent attention.

The trainer has its own latent attention. Megatron-Core's needs Transformer Engine only for
attention with values smaller than keys and for the names of fused norms; here torch provides both.
"""

import dataclasses

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from checkpoint_convert.hf_to_megatron import import_checkpoint
from helpers.models.tiny import tiny_model
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.transformer import transformer_config
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
    """The trainer's config, with Megatron-Core's names of the latents' fields."""
    own = transformer_config(
        shape, ParallelDims(), dtype=torch.float32, sequence_parallel=False, overrides={}
    )
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    latent = shape.latent
    return MLATransformerConfig(
        **fields
        | {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.rank,
            "qk_head_dim": shape.head_dim - latent.rotary_dim,
            "qk_pos_emb_head_dim": latent.rotary_dim,
            "v_head_dim": latent.value_dim,
            "rope_type": "rope",
            "rotary_base": shape.rope_theta,
            "rotary_percent": 1.0,
            "use_cpu_initialization": True,
        }
    )


def logits_of_import(rank, shape, imported):
    """Logits of `TOKENS` by Megatron-Core's model with the weights of a checkpoint."""
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
        if index in shape.moe.dense_layers:
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


# Without query latents, Megatron-Core's attention needs a norm that DeepSeek's models lack.
def test_megatrons_latent_attention_with_an_import_equals_transformers(tmp_path):
    model = tiny_model(tmp_path / "model", "deepseek_v3", q_lora_rank=24)
    import_checkpoint(model, tmp_path / "megatron", ParallelDims(tensor=2))
    (logits,) = run_ranks(1, logits_of_import, read_shape(model), tmp_path / "megatron")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model)(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
