"""Megatron-Core still has what ours stands in for, and reads what ours sets.

The day a case fails, look at what upstream has become: ours may go. The docstring of each override
names its case, as (test_upstream: mscale).
"""

import re
from dataclasses import fields
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.extensions import transformer_engine as te_layers
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common as gated_delta_net
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_grpo.policy import activation_offload, chunks, rope, router, transformer

PACKAGE = Path(__file__).parents[3] / "megatron_grpo"


def source(thing):
    return " ".join(getsource(thing).split())


# --- what ours stands in for --------------------------------------------------------------------


def torch_norm():
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False, persist_layer_norm=False, sequence_parallel=True
    )
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config, 8)


def mscale():
    """Fused RoPE of packed sequences is called without the factor."""
    with mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd") as fused:
        rope_utils.apply_rotary_pos_emb(
            torch.ones(4, 1, 8),
            torch.ones(4, 1, 1, 8),
            config=SimpleNamespace(apply_rope_fusion=True, rotary_interleaved=False),
            cu_seqlens=torch.tensor([0, 4]),
            mscale=1.25,
            cp_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0),
        )
    assert fused.call_args.kwargs == {"cp_size": 1, "cp_rank": 0, "interleaved": False}
    assert len(fused.call_args.args) == 3


def latent_projections():
    """Down-projections are whole with Transformer Engine's layer and split with torch's."""
    text = source(MLASelfAttention.__init__)
    for name in ("q", "kv"):
        whole = f"if submodules.linear_{name}_down_proj in [TELinear]: {name}_down_proj_kwargs"
        assert f"{whole}['parallel_mode'] = 'duplicated' elif" in text


def linear_kernels():
    """Both kinds of linear attention need kernels where there is no GPU."""
    assert "if not HAVE_FLA: raise ImportError" in source(gated_delta_net)
    assert "if not HAVE_MAMBA_SSM: raise ImportError" in source(mamba_mixer.MambaMixer.__init__)


def decay_dtype():
    """Where no compiler fuses it, the power is rounded to the dtype of the weights."""
    assert "g = -A_log_local_cp.exp() * F.softplus(alpha.float()" in source(gated_delta_net)


def linear_lengths():
    """The host waits for the lengths of packed sequences in every layer."""
    assert "total_cu = cu_seqlens[-1].cpu().item()" in source(gated_delta_net)


def indexer():
    """Scores of all heads exist at once, and of equal ones torch chooses any."""
    assert "torch.einsum('sbhd,tbd->sbht', q.float(), k.float())" in source(
        dsa._compute_index_scores
    )
    assert "index_scores.topk(topk_k, dim=-1)" in source(dsa.fused_qk_topk_naive)


def router_replay():
    """One list for all models of a process."""
    known = RouterReplay.global_router_replay_instances
    before = [*known]
    try:
        ours = [RouterReplay(), RouterReplay()]
        assert known[len(before) :] == ours
    finally:
        known[:] = before


def router_losses():
    """One table for all microbatches, which adds up means whatever their numbers of tokens."""
    assert get_moe_metrics_tracker() is get_moe_metrics_tracker()
    tracker = MoEMetricsTracker()
    for mean in (1.0, 3.0):
        tracker.record("z_loss", torch.tensor(mean), layer_number=1, num_layers=1)
    assert tracker.metrics["z_loss"].values.tolist() == [4.0]


def activation_offload_pool():
    """Memory is kept for good for each shape, and a first schedule decides about the next."""
    pool = offloading.OffloadTensorPool(device="cpu")
    for size in (2, 3):
        pool.free(pool.allocate((size,)))
    assert len(pool._pools) == 2
    assert "self._is_warmup = True" in source(offloading.PipelineOffloadManager.__init__)


def mtp():
    """The layer is a part of the GPTModel, and computes whole logits."""
    assert "self.mtp = MultiTokenPredictionBlock(" in source(GPTModel.__init__)
    assert "output_layer(" in source(multi_token_prediction.process_mtp_loss)


def muon():
    """Gate and up are one matrix, and tensor ranks orthogonalize their parts."""
    splits = [each.name for each in fields(OptimizerConfig) if each.name.startswith("muon_split")]
    assert splits == ["muon_split_qkv"]
    assert OptimizerConfig().muon_tp_mode == "blockwise"
    assert source(TensorParallelMuon.orthogonalize).count("torch.split(") == 1


def residency():
    """State that leaves is new pageable memory in every move."""
    text = source(MixedPrecisionOptimizer.offload_to_cpu)
    assert "p.data = p.data.cpu()" in text and "state_dict[k] = v.cpu()" in text


CASES = {
    each.__name__.removesuffix("_pool"): each
    for each in (
        *(torch_norm, mscale, latent_projections, linear_kernels, decay_dtype, linear_lengths),
        *(indexer, router_replay, router_losses, activation_offload_pool, mtp, muon, residency),
    )
}


@pytest.mark.parametrize("case", CASES)
def test_upstream_still_has(case):
    CASES[case]()


def test_every_case_is_named_by_an_override():
    text = " ".join(" ".join(file.read_text().split()) for file in PACKAGE.rglob("*.py"))
    named = re.findall(r"test_upstream: ([\w, ]+)\)", text)
    assert {name for names in named for name in names.split(", ")} == {*CASES}


# --- what ours sets -----------------------------------------------------------------------------

PATCHES = [
    (chunks.keep_choice_biases, TopKRouter._apply_expert_bias, "if self.enable_expert_bias and"),
    (chunks.keep_choice_biases, TopKRouter.routing, "expert_bias=self.expert_bias"),
    (chunks.keep_choice_biases, finalize_model_grads, "if config.moe_router_enable_expert_bias:"),
    (
        chunks.leave_out_sums_of_experts,
        RowParallelLinear.forward,
        "if self.explicit_expert_comm: assert self.skip_bias_add output_ = output_parallel",
    ),
    (chunks.recompute_no_missing_mlps, TransformerLayer, "if self.recompute_mlp: "),
    (chunks.mark_experts, DistributedDataParallel, "not getattr(param, 'allreduce', True)"),
    (
        chunks.gather_weights,
        _ParamAndGradBucketGroup.finish_param_sync,
        "if not self.param_gather_dispatched: self.start_param_sync()",
    ),
    (transformer.accumulate_in_products, te_layers, "fuse_wgrad_accumulation=self.config"),
    (transformer.route_with_torch, moe_utils, "if te_general_gemm is not None and"),
    (router.add_router_replay, TopKRouter.routing, "router_replay=self.router_replay"),
    (router.add_router_replay, MoELayer.forward, "if self.moe_layer_recompute and self.training"),
    (rope.rotate_own_tokens, SelfAttention.forward, "cp_group=self.pg_collection.cp"),
    (rope.packed_rotary, GPTModel, "self.rotary_pos_emb.get_rotary_seq_len("),
    (chunks._pass_hidden_states, GPTModel, "logits, _ = self.output_layer("),
]


@pytest.mark.parametrize(("ours", "theirs", "text"), PATCHES)
def test_megatron_reads_what_a_patch_sets(ours, theirs, text):
    assert callable(ours) and text in source(theirs)


def test_attention_passes_whether_sequences_are_padded():
    assert "pad_between_seqs" in {each.name for each in fields(PackedSeqParams)}
    kept = "self.kept_packed_seq_params = set( field.name for field in dataclasses.fields(Packed"
    assert kept in source(te_layers)


def test_megatrons_offloading_calls_only_methods_that_ours_has(monkeypatch):
    ours = activation_offload.Offloads(torch.device("cpu"))
    monkeypatch.setattr(offloading.PipelineOffloadManager, "OFFLOAD_MGR", ours)
    assert offloading.PipelineOffloadManager.get_instance() is ours
    asks = offloading.FineGrainedActivationOffloadingInterface
    functions = [asks.__enter__, asks.__exit__, asks.init_chunk_handler, asks.mark_not_offload]
    functions += [asks.get_context, asks.reset, offloading.fine_grained_offloading_group_start]
    functions.append(offloading.fine_grained_offloading_group_offload)
    called = {n for f in functions for n in re.findall(r"get_instance\(\)\.(\w+)\(", source(f))}
    assert called == {
        *("__enter__", "__exit__", "init_model_chunk_offload_handler", "mark_not_offload"),
        *("reset", "pop_forward_chunk", "cur_forward_chunk"),
    }
    assert called <= {*dir(ours)}
    handler = offloading.ChunkOffloadHandler
    for name in (n for n in vars(activation_offload.Microbatch) if n.startswith("on_group")):
        assert hasattr(handler, name)
