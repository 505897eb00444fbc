"""The same model on CUDA: Transformer Engine's layers beside torch's, and NCCL between GPUs."""

from pathlib import Path

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from distributed import run_ranks
from megatron_grpo.config_file import load_config
from megatron_grpo.model import build_policy
from megatron_grpo.schedule import run_schedule
from megatron_grpo.train_step import compute_logprobs, response_logprobs
from models import tiny_model
from oracle import oracle_logprobs
from parallel import (
    Alignment,
    PackedBatch,
    ParallelDims,
    TokenSequence,
    init_groups,
    pack,
    setup_device,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
LENGTHS = [(5, 32), (3, 9), (20, 44), (7, 41)]
# Transformer Engine's attention wants heads of at least 64 in some kernels.
SHAPE = {"num_hidden_layers": 4, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


def random_sequences() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)
    return [
        TokenSequence(
            tokens=torch.randint(4, 250, (prompt + completion,), generator=generator),
            num_prompt_tokens=prompt,
            advantage=1.0,
            loss_weight=0.01,
            rollout_logprobs=torch.zeros(completion),
        )
        for prompt, completion in LENGTHS
    ]


def logprobs_and_gradient_norm(
    rank: int, folder: Path, dims: ParallelDims, dtype: str, implementation: str
) -> tuple[Tensor | None, float]:
    """Response log-probabilities in packed order on the last stage, and the gradient norm."""
    device = setup_device(rank)
    groups = init_groups(dims)
    cfg = load_config(
        Path("configs/tiny_cpu.yaml"),
        [
            f"model.path={folder}",
            f"model.dtype={dtype}",
            f"model.megatron.transformer_impl={implementation}",
            f"parallel.tensor_parallel_size={dims.tensor}",
            f"parallel.pipeline_parallel_size={dims.pipeline}",
            f"parallel.context_parallel_size={dims.context}",
            f"parallel.data_parallel_size={dims.data}",
        ],
    )
    policy = build_policy(cfg, read_shape(folder), groups)
    alignment = Alignment.of(dims, cfg.parallel.sequence_parallel)
    indices = list(range(len(LENGTHS)))
    share = indices[groups.coordinates.data :: dims.data]
    batch = pack(random_sequences(), share, alignment).to(device)

    def loss_fn(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, None]:
        logprobs, _, _ = response_logprobs(policy, logits, batch, 1.0, groups)
        return -(logprobs * batch.loss_weights).sum(), None

    (whole,) = compute_logprobs(policy, [batch], 1.0, groups)
    policy.zero_grad()
    run_schedule(policy, groups, [batch], loss_fn, forward_only=False)
    norm = policy.optimizer.step()[1]
    return None if whole is None else whole[batch.loss_mask].cpu(), norm


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request, tmp_path_factory):
    shape = {key: SHAPE[key] for key in SHAPE if (request.param, key) != ("qwen2", "head_dim")}
    return tiny_model(tmp_path_factory.mktemp(request.param), request.param, **shape)


def oracle(folder: Path) -> Tensor:
    sequences = random_sequences()
    with torch.no_grad():
        logprobs = oracle_logprobs(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            [s.tokens[: s.num_prompt_tokens].tolist() for s in sequences],
            [s.tokens[s.num_prompt_tokens :].tolist() for s in sequences],
        )
    return torch.cat(logprobs)


def test_torch_layers_equal_transformers_on_cuda(folder):
    ((logprobs, _),) = run_ranks(
        1, logprobs_and_gradient_norm, folder, ParallelDims(), "float32", "local", cuda=True
    )
    torch.testing.assert_close(logprobs, oracle(folder), atol=1e-4, rtol=0)


@pytest.mark.skipif(not HAVE_TE, reason="needs Transformer Engine")
def test_transformer_engine_layers_have_the_numbers_of_torch_layers(folder):
    results = [
        run_ranks(1, logprobs_and_gradient_norm, folder, ParallelDims(), *variant, cuda=True)[0]
        for variant in (("bfloat16", "local"), ("bfloat16", "transformer_engine"))
    ]
    (local, local_norm), (fused, fused_norm) = results
    rounding = (local - oracle(folder)).abs().mean()
    assert (fused - local).abs().mean() < 2 * rounding
    assert fused_norm == pytest.approx(local_norm, rel=3e-2)


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(tensor=2),
        ParallelDims(pipeline=2),
        ParallelDims(context=2),
        ParallelDims(data=2),
        ParallelDims(tensor=2, pipeline=2, context=2),
    ],
    ids=str,
)
def test_layouts_agree_over_nccl(folder, dims):
    if torch.cuda.device_count() < dims.world_size:
        pytest.skip(f"needs {dims.world_size} GPUs")
    results = run_ranks(
        dims.world_size, logprobs_and_gradient_norm, folder, dims, "float32", "local", cuda=True
    )
    ((_, want),) = run_ranks(
        1, logprobs_and_gradient_norm, folder, ParallelDims(), "float32", "local", cuda=True
    )
    for logprobs, norm in results:
        assert norm == pytest.approx(want, rel=1e-5)
        if logprobs is not None and dims.data == 1:
            torch.testing.assert_close(logprobs, oracle(folder), atol=1e-4, rtol=0)
