"""Log-probabilities of 2,048 tokens from hidden states, and both gradients; Qwen2.5's vocabulary.

From hidden states [N, H] and a head [V, H] to log-probabilities of the tokens, and the gradients of
a weighted sum of them to both, on one rank. Ours, verl's and TRL's fused head give entropies as
well. Seconds first;
then once more for peak memory: what the process has beside its inputs, while every block of 64 KiB
and more is given back to the system when it is freed, which would cost each side page faults.

In bfloat16 where the CPU multiplies it, and else in float32: there torch's loops for one of the
three products make 0.5 GFLOP/s, and nothing beside is seen. One side of ours is bfloat16 always.

LOGPROBS_SHAPE, as 2048x151936x1024, is another N, V and H.
"""

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from parallel.dtypes import product_dtype

NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE = map(
    int, os.environ.get("LOGPROBS_SHAPE", "2048x151936x1024").split("x")
)
DTYPE = product_dtype(torch.bfloat16)
WARM_TOKENS = 64
M_MMAP_THRESHOLD = -3
WITHIN = 0.1
"""Allowed error of a log-probability: TRL takes the softmax in bfloat16."""

MEGATRON, TRL = f"megatron-core {version('megatron-core')}", f"trl {version('trl')}"
ROUNDS = 3
TITLE = (
    "Log-probabilities without logits, forward and backward, "
    f"{NUM_TOKENS:,} x {VOCAB_SIZE:,} x {HIDDEN_SIZE:,} {str(DTYPE).removeprefix('torch.')}"
)
REQUIREMENTS = {
    "liger": ["liger-kernel==0.8.5", "triton==3.7.1"],
    "verl": [
        "verl==0.9.1",
        *("ray==2.60.0", "tensordict==0.15.3", "orjson==3.13.0", "omegaconf==2.3.1"),
        *("antlr4-python3-runtime==4.9.3", "hydra-core==1.3.8", "pyvers==0.2.3"),
        *("cloudpickle==3.1.2", "msgpack==1.2.4", "importlib_metadata==10.2.0"),
        "codetiming==1.4.0",
    ],
}
SETTINGS = {
    "ours, bfloat16": "hidden states, head and gradients in bfloat16, whatever the others have",
    "megatron-core": f"{MEGATRON}: vocab_parallel_cross_entropy behind the matrix product; no "
    "entropy",
    "megatron-core, fused": f"{MEGATRON}: fused_vocab_parallel_cross_entropy (what "
    "cross_entropy_loss_fusion takes, compiled by torch) behind the product; no entropy",
    "trl": f"{TRL}: the fused head of its GRPO trainer, in its chunks and its torch operations, "
    "which on a CPU multiply float32 for the gradients",
    "trl, whole logits": f"{TRL}: selective_log_softmax behind the product; no entropy",
    "liger": "the chunked selective log-probability of its GRPO loss, in its chunks; no entropy",
    "verl": "FusedLinearForPPO, impl_backend torch, chunk_size 512",
}
GOALS = [
    ("seconds", "megatron-core", 1 / 1.2),
    ("peak_bytes", "megatron-core", 4.0),
    ("peak_bytes", "best", 1.0),
]

Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden states [n, H], head [V, H], tokens [n]) -> log-probabilities [n]."""


def measured(
    logprobs_of: Logprobs,
    folder: Path,
    dtype: torch.dtype = DTYPE,
    warm_tokens: int = WARM_TOKENS,
) -> dict[str, float]:
    """One forward and backward for time, after a short one that warms up, and one for memory."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).to(dtype)
    head = torch.empty(VOCAB_SIZE, HIDDEN_SIZE, dtype=dtype)
    for rows in head.split(1024):  # no float32 copy of it all
        rows.copy_(torch.randn(rows.shape, generator=generator) / HIDDEN_SIZE**0.5)
    tokens = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    weights = torch.randn(NUM_TOKENS, generator=generator)

    def run(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        own = hidden[:num_tokens].detach().requires_grad_()
        logprobs = logprobs_of(own, head.requires_grad_(), tokens[:num_tokens])
        loss = (logprobs.float() * weights[:num_tokens]).sum()
        return logprobs.detach(), *torch.autograd.grad(loss, [own, head])

    run(warm_tokens)
    start = time.perf_counter()
    run(NUM_TOKENS)
    seconds = time.perf_counter() - start
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)  # what the first has left may be used again, and would not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    before = resident("VmRSS")
    logprobs, of_hidden, of_head = run(NUM_TOKENS)
    peak = resident("VmHWM") - before
    every = max(1, VOCAB_SIZE // 1000)
    torch.save([logprobs.float(), of_hidden, of_head[::every].clone()], folder / "results.pt")
    return {"seconds": seconds, "peak_bytes": float(peak)}


def resident(key: str) -> int:
    """Bytes of this process's memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def ours(folder: Path, dtype: torch.dtype = DTYPE) -> dict[str, float]:
    """With entropies."""
    from parallel.logprobs import chosen_logprobs
    from parallel.rank_part import Predictions

    def logprobs_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        # Position t predicts token t + 1; the first token is of the prompt.
        following = torch.cat([tokens[:1], tokens])
        select = torch.ones(len(following), dtype=torch.bool)
        targets = torch.arange(1, len(following))
        chosen = chosen_logprobs(
            hidden,
            head,
            following,
            Predictions.of(targets, select),
            temperature=1.0,
            vocab_size=len(head),
            tensor_group=None,
        )
        return chosen.logprobs

    return measured(logprobs_of, folder, dtype)


def megatron_core(folder: Path, fused: bool = False) -> dict[str, float]:
    """One tensor rank."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from parallel import ParallelDims
    from parallel.cpu_device import setup_device
    from parallel.groups import init_groups

    setup_device(0)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    groups = init_groups(ParallelDims())

    def logprobs_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, head)[:, None]
        if fused:
            return -fused_vocab_parallel_cross_entropy(logits, tokens[:, None], groups.tensor)[:, 0]
        return -vocab_parallel_cross_entropy(logits, tokens[:, None])[:, 0]

    # torch compiles for a number of tokens, and again for another.
    return measured(logprobs_of, folder, warm_tokens=NUM_TOKENS if fused else WARM_TOKENS)


def trl(folder: Path) -> dict[str, float]:
    """With entropies."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    def logprobs_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        softcap, scale, outputs = None, 1.0, ("log_probs", "entropy")
        logprobs: Tensor = ChunkedLogProbFunction.apply(
            *(hidden, head, None, tokens, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, softcap, scale, outputs)
        )[0]
        return logprobs

    return measured(logprobs_of, folder)


def trl_whole_logits(folder: Path) -> dict[str, float]:
    """Whole logits."""
    from trl.trainer.utils import selective_log_softmax

    def logprobs_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, head)
        logprobs: Tensor = selective_log_softmax(logits[None], tokens[None])[0]
        return logprobs

    return measured(logprobs_of, folder)


def liger(folder: Path) -> dict[str, float]:
    """What LigerFusedLinearGRPOLoss makes log-probabilities by."""
    from liger_kernel.chunked_loss import fused_linear_ppo

    def logprobs_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        logprobs: Tensor = fused_linear_ppo._ChunkedSelectiveLogProbFunction.apply(
            hidden, head, tokens, None, 1.0, fused_linear_ppo._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
        )
        return logprobs

    return measured(logprobs_of, folder)


def verl(folder: Path) -> dict[str, float]:
    """With entropies."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    fused = FusedLinearForPPO(chunk_size=512)

    def logprobs_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        logprobs: Tensor = fused(hidden[None], head, tokens[None], temperature=1.0)[0][0]
        return logprobs

    return measured(logprobs_of, folder)


SIDES = {
    "ours": ours,
    "ours, bfloat16": partial(ours, dtype=torch.bfloat16),
    "megatron-core": megatron_core,
    "megatron-core, fused": partial(megatron_core, fused=True),
    "trl": trl,
    "trl, whole logits": trl_whole_logits,
    "liger": liger,
    "verl": verl,
}


def compare(ours: Path, peer: Path) -> str:
    """Log-probabilities at most `WITHIN` apart, and gradients 2%, by norm."""
    (logprobs, *gradients), (others, *theirs) = (
        torch.load(folder / "results.pt") for folder in (ours, peer)
    )
    gap = float((logprobs - others).abs().max())
    errors = [
        float((a.float() - b.float()).norm() / a.float().norm())
        for a, b in zip(gradients, theirs, strict=True)
    ]
    assert gap < WITHIN, gap
    assert max(errors) < 0.02, errors
    return (
        f"log-probabilities within {gap:.1e}; gradients to hidden states {errors[0]:.1e}, "
        f"to the head {errors[1]:.1e}, by norm"
    )
