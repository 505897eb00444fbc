"""Tokens per second and memory of an optimizer step on one GPU, next to prime-rl's on an H100.

    PYTHONPATH=.:tests python tests/gpu/bench_step.py [--tokens 16384] [--profile] [KEY=VALUE...]

A random model of Qwen3-0.6B's shape (bf16 weights, float32 gradients, masters and moments) trains
on one packed microbatch per step. It is a single sequence: a prompt of 512 tokens and its
completion. A step is forward, GRPO loss, backward, clipping and Adam; layers are recomputed in the
backward pass. Time is the median between CUDA events around the step, after two warm-up steps;
memory is torch's peak allocated and peak reserved. Prints one JSON line per length, with date, card
and versions. prime-rl's figures are those of its benchmarks/results/BENCHMARKS.md, full fine-tuning
with RL.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch.profiler import profile

from checkpoint_convert import hf_tensors, read_shape
from helpers.oracle.policies import tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.config.config import Config
from megatron_grpo.policy.model import build_policy
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.packing import PackedBatch, TokenSequence, pack

SHAPES = {
    "qwen3-0.6b": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b-4": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 1000,
    },
}
PRIME_RL = {16384: (11_900.0, 12.5), 65536: (10_150.0, 19.6)}
"""Tokens per second and GiB on an H100, by sequence length."""
PROMPT, WARM_UP = 512, 2
RECOMPUTE = ["granularity=full", "method=uniform", "num_layers=1"]


def main() -> None:
    """Print a JSON line for each length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[*PRIME_RL])
    parser.add_argument("--steps", type=int, default=5, help="counted ones")
    parser.add_argument("--profile", action="store_true", help="kernels of one more step, too")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the config")
    arguments = parser.parse_args()
    for num_tokens in arguments.tokens:
        with tempfile.TemporaryDirectory() as name:
            folder = write_model(Path(name), SHAPES[arguments.model])
            [found] = run_ranks(
                1,
                measure,
                folder,
                num_tokens,
                arguments.steps,
                arguments.profile,
                arguments.overrides,
                cuda=torch.cuda.is_available(),
                timeout=1800,
            )
        report = {"model": arguments.model, "tokens": num_tokens, **this_machine(), **found}
        report |= {"overrides": arguments.overrides} if arguments.overrides else {}
        if arguments.model == "qwen3-0.6b" and num_tokens in PRIME_RL:
            rate, memory = PRIME_RL[num_tokens]
            report["tokens_per_second_over_prime_rl_h100"] = found["tokens_per_second"] / rate
            report["memory_over_prime_rl_h100"] = found["reserved_gib"] / memory
        print(json.dumps(report), flush=True)


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a random Qwen3 model of this shape."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
    } | shape
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(size, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        for name, size in hf_tensors(read_shape(folder)).items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def measure(
    rank: int, folder: Path, num_tokens: int, num_steps: int, profiles: bool, overrides: list[str]
) -> dict[str, float]:
    """Speed and memory of a step; runs in its own process."""
    device = setup_device(rank)
    cfg = tiny_config(
        folder,
        ParallelDims(),
        "model.dtype=bfloat16",
        "grpo.beta=0",
        f"train.max_tokens_per_microbatch={num_tokens}",
        *(f"model.megatron.recompute_{option}" for option in RECOMPUTE),
        *overrides,
    )
    groups = init_groups(cfg.dims)
    policy = build_policy(cfg, read_shape(folder), groups)
    batch = one_sequence(num_tokens, policy.shape.vocab_size, cfg)
    batch = batch.on_rank(groups.dims, groups.coordinates).to(device)
    skipped = SkippedSteps(cfg.train.max_skipped_steps, 0)

    def step() -> None:
        report = train_step(policy, [batch], cfg, groups, LossFunction.of(cfg.grpo), skipped, 0.0)
        assert not report.metrics["skipped_steps"], report.metrics

    seconds = [timed(step, device) for _ in range(WARM_UP + num_steps)][WARM_UP:]
    memory = {}
    if device.type == "cuda":
        memory = {
            "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    if profiles:
        with profile() as recorded:
            step()
        order = f"self_{device.type}_time_total"
        print(recorded.key_averages().table(sort_by=order, row_limit=40), file=sys.stderr)
    return {
        "seconds": median(seconds),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "tokens_per_second": num_tokens / median(seconds),
        **memory,
    }


def one_sequence(num_tokens: int, vocab_size: int, cfg: Config) -> PackedBatch:
    """A microbatch of a single sequence."""
    generator = torch.Generator().manual_seed(0)
    prompt = min(PROMPT, num_tokens // 4)
    sequence = TokenSequence(
        tokens=torch.randint(vocab_size, (num_tokens,), generator=generator),
        num_prompt_tokens=prompt,
        advantage=1.0,
        loss_weight=1 / (num_tokens - prompt),
        rollout_logprobs=torch.full((num_tokens - prompt,), -10.0),
    )
    return pack([sequence], [0], cfg.alignment)


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of `work`: between CUDA events, or wall-clock time on a CPU."""
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def this_machine() -> dict[str, str]:
    """Date, card and versions of a measurement."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    names = ["torch", "megatron-core"]
    return {"date": date.today().isoformat(), "card": card} | {n: version(n) for n in names}


if __name__ == "__main__":
    main()
