"""Memory of sparse attention while it computes: planned, and held by torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import pack_all, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.planning import attention as planned
from megatron_grpo.planning.attention import SparseAttention
from megatron_grpo.planning.card import card_named
from megatron_grpo.planning.engine_memory import engine_bytes
from megatron_grpo.planning.host import choice_lines
from megatron_grpo.policy import sparse_attention as policy
from megatron_grpo.policy.model import build_model, forward
from parallel import ParallelDims
from parallel import sparse_attention as computed
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.rank_part import context_indices
from parallel.sparse_attention import Queries, sparse_attention

TOKENS = 1024
# Sizes of values and of keys are equal, so that torch has a kernel without scores on CPUs, too.
SIZES = {
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "index_topk": 32,
    "max_position_embeddings": TOKENS,
}


def config(folder: Path, dims: ParallelDims, *overrides: str) -> Config:
    return tiny_config(
        folder,
        dims,
        "model.dtype=bfloat16",
        f"train.max_tokens_per_microbatch={TOKENS}",
        "model.megatron.transformer_impl=local",
        *overrides,
    )


class Peaks:
    """Peak bytes within functions, beyond those before the call."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
                result = function(*args)
            events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
            held = self.peaks[name] = 0
            for event in sorted(events, key=lambda each: each.start_ns()):
                held += event.nbytes()
                self.peaks[name] = max(self.peaks[name], held)
            return result

        return watched


def peaks_on_rank(rank: int, cfg: Config) -> dict[str, int]:
    setup_device(rank)
    groups, peaks = init_groups(cfg.dims), Peaks()
    model = build_model(cfg, read_shape(cfg.model.path), groups)
    for parameter in model.parameters().values():
        parameter.data.uniform_(-0.1, 0.1)
    attention = model.chunks[0].decoder.layers[0].self_attention
    attention._choose = peaks.of("choose", attention._choose)
    given: list[Any] = []
    policy.sparse_attention = lambda *args: given.extend(args) or sparse_attention(*args)
    [batch] = pack_all([[(TOKENS // 4, 3 * TOKENS // 4)]], cfg.dims)
    with torch.no_grad():
        forward(model.chunks[0], batch.on_rank(groups.dims, groups.coordinates), groups)
    inputs = [each.detach().requires_grad_() for each in given[:3]]
    output = peaks.of("forward", sparse_attention)(*inputs, *given[3:6])
    peaks.of("backward", output.backward)(torch.ones_like(output))
    return peaks.peaks


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("deepseek_v32", ParallelDims()),
        ("glm_moe_dsa", ParallelDims(tensor=2)),
        ("deepseek_v32", ParallelDims(context=2)),
    ],
    ids=str,
)
def test_indexer_and_attention_hold_what_is_planned(tmp_path, family, dims):
    cfg = config(tiny_model(tmp_path, family, **SIZES), dims)
    ranks = run_ranks(dims.world_size, peaks_on_rank, cfg)
    measured = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    attention = SparseAttention(read_shape(cfg.model.path))
    expected = {"choose": attention.choosing_bytes(cfg)} | {
        name: attention.attending_bytes(cfg, "cpu", backward=name == "backward")
        for name in ("forward", "backward")
    }
    assert measured == pytest.approx(expected, rel=0.06)


def test_no_block_of_queries_sees_more_keys_than_are_planned(tmp_path):
    assert (planned.BLOCK, planned.INDEX_BLOCK) == (computed.BLOCK, computed.INDEX_BLOCK)
    folder, longest, block = write_config(tmp_path, "DeepSeek-V3.2"), 96, 8
    lengths = ["data.max_prompt_length=32", f"rollout.max_completion_length={longest - 32}"]
    for size in (1, 2, 4):
        cfg = config(folder, ParallelDims(context=size), *lengths)
        bound = SparseAttention(read_shape(folder)).num_keys(cfg, block)
        seen = []
        # A short sequence before two long ones shifts where blocks begin.
        for short in range(2 * size, longest, 2 * size):
            cu_seqlens = torch.tensor([0, short, short + longest, short + 2 * longest])
            for rank in range(size):
                queries = Queries.of(context_indices(cu_seqlens, rank, size), cu_seqlens)
                seen += [len(keys.positions("cpu")) for _, keys in queries.blocks(block)]
        assert 0.8 * bound <= max(seen) <= bound


def test_choice_lines_have_the_bytes_of_replayed_choices(tmp_path):
    folder, dims = write_config(tmp_path, "DeepSeek-V3.2"), ParallelDims(context=2, pipeline=4)
    replay = ["rollout.indexer_replay=true", "rollout.max_completion_length=32736"]
    replay += ["rollout.engine=sglang", "rollout.vllm={}", "rollout.data_parallel_size=16"]
    replay += ["rollout.sglang={ep_size: 16, max_total_tokens: 9000}"]
    cfg = config(folder, dims, *replay, "data.max_prompt_length=32")
    cfg = cfg.model_copy(update={"grpo": cfg.grpo.model_copy(update={"steps_per_generation": 2})})
    shape = read_shape(folder)
    engine = engine_bytes(cfg, shape, card_named("h200"))
    token = 61 * 2048  # numbers of a token
    _, *rows, hint = choice_lines(cfg, shape, [16_000] * 4, engine)
    whole = 2 * 64_000 * token * 2
    sizes = [whole, whole / 2, whole / 8, 16 * 9000 * token * 4]
    assert [row.split()[0] for row in rows] == [f"{size / 1e9:,.1f}" for size in sizes]
    assert rows[0].endswith("for 128,000 tokens of a generation")
    assert hint.startswith("hint: rollout.sglang.max_total_tokens=")
    without = cfg.rollout.model_copy(update={"indexer_replay": False})
    assert choice_lines(cfg.model_copy(update={"rollout": without}), shape, [1], engine) == []


@pytest.mark.parametrize("num_completion_tokens", [1024, 1025])
def test_only_sequences_longer_than_index_topk_need_working_memory(tmp_path, num_completion_tokens):
    folder = write_config(tmp_path, "DeepSeek-V3.2")
    lengths = ["data.max_prompt_length=1024", "rollout.max_completion_length="]
    cfg = config(folder, ParallelDims(), lengths[0], f"{lengths[1]}{num_completion_tokens}")
    is_needed = num_completion_tokens > 1024
    for backward in (False, True):
        found = SparseAttention(read_shape(folder)).working_bytes(cfg, "cuda", backward=backward)
        assert (found > 0) == is_needed
