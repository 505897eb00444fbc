"""Whole runs on GPUs: ranks, engines, pushes, and the end of a run that loses a rank."""

import json
import re
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from demo.make_squares import write
from demo.make_sums import sums as all_sums
from helpers.engines.live import SGLANG_PYTHON, wait_until
from helpers.models.images import tiny_vision_model
from helpers.models.tiny import INDEXED, mixture_of_blocks, tiny_model
from helpers.runs.train import (
    TINY_CONFIG,
    finish_run,
    marked_processes,
    read_completions,
    read_metrics,
    start_run,
)
from megatron_grpo.engines.support import WITH_ROUTERS_OF_16_BITS

COLOURS = TINY_CONFIG.parent / "learn_colours.yaml"
MOST_GAP = 0.03
"""Largest mean gap of log-probabilities in bfloat16, in nats; 0.021 was seen on CPUs, with logits
in bfloat16 or float32, since this model's are small (test_gpu_engine.py has large ones)."""

MOST_GAP_OF_A_TOKEN = 0.2
"""Gap with replayed experts; 0.05 was seen on CPUs, and 0.6 without replay."""

LATENTS = {"qk_nope_head_dim": 128, "v_head_dim": 128}
"""DeepSeek-V3's sizes, the ones that FlashAttention takes for latents on GPUs."""

MOST_GAP_OF_8_BITS = 0.1
"""Gap between ranks in bfloat16 and engines with quantised weights; 0.02 was seen on CPUs."""

MOST_GAP_OF_KINDS = 0.2
"""Gap for kinds of attention; a model without its windows or sinks has 0.46 to 1.02."""

MOST_GAP_OF_CHOICES = 0.3
"""Gap for sparse attention. A DeepSeek-V3.2 of these sizes, in transformers on a CPU after one of
these prompts, has 0.09 if it chooses tokens in 8 bits instead of float32, and 0.95 if dense."""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Arguments of a run with head size 64, which every attention kernel supports, and an engine on
    the GPU of rank 0."""
    model = tiny_model(
        tmp_path / "model", "qwen3", hidden_size=256, intermediate_size=512, head_dim=64
    )
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in all_sums()))
    return [
        f"model.path={model}",
        "model.dtype=bfloat16",
        f"data.path={data}",
        f"train.run_dir={tmp_path / 'run'}",
        "rollout.vllm={gpu_memory_utilization: 0.3, max_model_len: 512}",
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
    ]


@pytest.fixture
def trained(arguments: list[str], tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """Train three steps; checks that gaps stay below `most` after pushes; returns the metrics."""

    def trained(
        *more: str, most: float = MOST_GAP, learns: bool = True, words: str = ""
    ) -> list[dict[str, float]]:
        run = finish_run(*arguments, "train.num_steps=3", *more, timeout=800)
        assert run.exit_code == 0 and words in run.output, run.output
        assert run.survivors == []
        records = read_metrics(tmp_path / "run")
        print([record["rollout/logprob_gap_mean"] for record in records])
        assert [record["step"] for record in records] == [1, 2, 3]
        for record in records:
            assert record["grad_norm"] > 0 or not learns
            assert record["rollout/logprob_gap_mean"] < most
        return records

    return trained


FAST, SLOW = "optimizer.lr=1e-2", "optimizer.lr=1e-3"
SLEEPS = "rollout.enable_sleep_mode=true"


def test_run_on_one_gpu_agrees_with_its_engine(trained, tmp_path):
    records = trained(FAST, words="layers: Transformer Engine")
    assert 0 < records[0]["probe/logprob_gap_mean"] < MOST_GAP
    for record in records:
        assert record["skipped_steps"] == 0
        assert 0 < record["perf/max_memory_allocated_gb"] < record["perf/max_memory_reserved_gb"]
    versions = [row["policy_version"] for row in read_completions(tmp_path / "run")]
    assert versions == [0] * 16 + [1] * 16 + [2] * 16


def test_run_gets_the_memory_of_a_sleeping_engine(trained, tmp_path):
    trained(SLEEPS, FAST, learns=False)  # from weights pushed after a sleep
    log = (tmp_path / "run" / "logs" / "engine_0.log").read_text()
    freed = [float(words) for words in re.findall(r"Sleep mode freed ([\d.]+) GiB memory", log)]
    total = torch.cuda.mem_get_info()[1] / 2**30
    # Its share of 0.3, except for the CUDA context.
    assert len(freed) == 5 and min(freed) > 0.2 * total, log


def mixture_of(folder: Path) -> list[str]:
    """A random mixture; a token with another expert has a very different log-probability."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    model = tiny_model(folder, "qwen3_moe", num_experts=8, **sizes)
    return [f"model.path={model}", "rollout.router_replay=true"]


def test_run_trains_a_mixture_with_the_experts_that_vllm_chose(trained, tmp_path):
    for record in trained(*mixture_of(tmp_path / "mixture"), FAST):
        assert record["rollout/logprob_gap_max"] < MOST_GAP_OF_A_TOKEN


def test_run_trains_a_mixture_with_images(tmp_path):
    pytest.importorskip("torchvision", reason="vLLM's multimodal models need it")
    model, rows = tiny_vision_model(tmp_path / "model", "qwen3_vl_moe"), write(tmp_path / "squares")
    run = finish_run(
        f"model.path={model}",
        "model.dtype=bfloat16",
        f"data.path={rows}",
        f"train.run_dir={tmp_path / 'run'}",
        "rollout.vllm.gpu_memory_utilization=0.3",
        "rollout.router_replay=true",
        "train.num_steps=3",
        config=COLOURS,
        timeout=800,
    )
    assert run.exit_code == 0, run.output
    for record in read_metrics(tmp_path / "run"):
        assert record["grad_norm"] > 0
        assert record["rollout/logprob_gap_mean"] < MOST_GAP  # also after a push


def test_run_pushes_only_adapters(trained):
    trained("lora.r=8", FAST)


CORRECTED = "grpo.rollout_importance_sampling_mode=token_truncate"
MAMBA = {"mamba_head_dim": 64, "ssm_state_size": 128, "num_hidden_layers": 4}


def test_vllm_computes_mamba_and_experts_without_gates(trained, tmp_path):
    if torch.cuda.get_device_capability()[0] not in WITH_ROUTERS_OF_16_BITS:
        pytest.skip("vLLM has routers in float32 on this GPU, which the run refuses")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64} | MAMBA
    model = tiny_model(tmp_path / "mamba", "nemotron_h", **sizes)
    # Some tokens take other experts.
    trained(f"model.path={model}", SLOW, most=MOST_GAP_OF_8_BITS)


OF_SGLANG = (
    "rollout.engine=sglang",
    f"rollout.python={SGLANG_PYTHON}",
    "rollout.vllm={}",
    "rollout.sglang={mem_fraction_static: 0.3, context_length: 512}",
)
with_sglang = pytest.mark.skipif(
    not SGLANG_PYTHON.exists(), reason="needs .venv-sglang, with SGLang for GPUs"
)
AWARE = "rollout.quantization_aware=true"
OF_8_BITS = [
    *((family, x, ()) for family in ("qwen3", "qwen3_moe") for x in ("fp8", "fp8_channel", "int8")),
    ("deepseek_v3", "fp8", ()),
    ("qwen3", "fp8", (AWARE,)),
    # Engines that sleep between generations.
    ("qwen3", "fp8", (SLEEPS,)),
    ("qwen3", "int8", (SLEEPS,)),
    ("deepseek_v3", "fp8", (SLEEPS,)),
    *(
        pytest.param(family, "fp8", OF_SGLANG, marks=with_sglang)
        for family in ("qwen3", "qwen3_moe", "deepseek_v3")
    ),
]


@pytest.mark.parametrize(("family", "quantization", "options"), OF_8_BITS)
def test_engine_of_8_bits_multiplies_by_the_ranks_quantised_weights(
    trained, tmp_path, family, quantization, options
):
    model = mixture_arguments(tmp_path / "mixture", family)
    bits = f"rollout.quantization={quantization}", CORRECTED, *options
    for record in trained(*model, *bits, SLOW, most=MOST_GAP_OF_8_BITS):
        assert record["rollout/logprob_gap_mean"] > 0


def mixture_arguments(folder: Path, family: str) -> list[str]:
    """Arguments of a run of another model than that of `arguments`."""
    if family == "qwen3":
        return []
    sizes = LATENTS if family == "deepseek_v3" else {}
    return [f"model.path={mixture_of_blocks(folder, family, **sizes)}"]


LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
SPARSE = {
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 128,
    **LATENTS,
}
"""Sizes that kernels of sparse attention take; prompts are longer than twice `index_topk`."""
SERVED_BY_SGLANG = {
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "gemma3_text": {"tied": True},
    "gpt_oss": {"intermediate_size": 256},
    "olmo3": {
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": 5e3}
            for kind in ("full", "sliding")
        }
    },
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
}
"""Families with windows, sinks, linear or sparse attention, and the fields of their models."""


@with_sglang
@pytest.mark.parametrize("family", SERVED_BY_SGLANG)
def test_sglang_computes_windows_sinks_linear_and_sparse_attention(trained, tmp_path, family):
    sizes = {"hidden_size": 256, "head_dim": 64} | SERVED_BY_SGLANG[family]
    folder = tiny_model(tmp_path / family, family, **sizes)
    # Some layers of SGLang take their dtype from config.json, whatever model.dtype is.
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    options = with_long_prompts(tmp_path / "long.jsonl") if family in INDEXED else []
    most = MOST_GAP_OF_CHOICES if family in INDEXED else MOST_GAP_OF_KINDS
    trained(*OF_SGLANG, f"model.path={folder}", SLOW, *options, most=most, learns=False)


def with_long_prompts(data: Path) -> list[str]:
    """Arguments of a run with prompts of 5,000 characters, each one token."""
    sums = [row["prompt"] for row in all_sums()]
    prompts = [" ".join([*sums[i:], *sums])[:5000] for i in range(16)]
    data.write_text("".join(json.dumps({"prompt": each, "answer": ""}) + "\n" for each in prompts))
    return [
        f"data.path={data}",
        "rollout.max_completion_length=64",
        "rollout.sglang.context_length=8192",
        "train.max_tokens_per_microbatch=8192",
    ]


@with_sglang
def test_run_gets_the_memory_of_a_sleeping_sglang(trained, tmp_path):
    (_, total), free = torch.cuda.mem_get_info(), []

    def watch() -> None:  # until the run is complete, when all memory is free
        while not (tmp_path / "run" / "hf").exists() and not is_over.wait(0.05):
            free.append(torch.cuda.mem_get_info()[0])

    is_over = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        trained(*OF_SGLANG, SLEEPS, learns=False)  # from weights pushed after a sleep
    finally:
        is_over.set()
        watching.join()
    awake = min(free)
    assert max(free[free.index(awake) :]) - awake > 0.2 * total  # of a share of 0.3


@pytest.mark.parametrize("replays", [False, True])
def test_weights_are_pushed_while_the_engine_generates(arguments, tmp_path, replays):
    if replays:  # completions that a push has interrupted have the experts of all their tokens
        arguments = [*arguments, *mixture_of(tmp_path / "mixture")]
    run = finish_run(
        *arguments,
        "rollout.in_flight_updates=true",
        "rollout.max_staleness=3",
        "rollout.max_completion_length=200",
        "optimizer.lr=1e-6",  # consecutive versions have nearly equal log-probabilities
        CORRECTED,
        "train.num_steps=6",
        timeout=800,
    )
    assert run.exit_code == 0, run.output
    rows = read_completions(tmp_path / "run")
    spans = [row.get("versions") or [(row["policy_version"], row["num_tokens"])] for row in rows]
    assert max(map(len, spans)) > 1
    for row, versions in zip(rows, spans, strict=True):
        assert 0 <= row["step"] - 1 - versions[0][0] <= 3
    for record in read_metrics(tmp_path / "run"):
        assert record["rollout/logprob_gap_mean"] < MOST_GAP


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("end", "seconds"), [(signal.SIGKILL, 20), (signal.SIGSTOP, 90)])
def test_a_rank_that_ends_or_stops_in_a_collective_of_nccl_ends_the_run(
    arguments, tmp_path, end, seconds
):
    mark, metrics = uuid.uuid4().hex, tmp_path / "run" / "metrics.jsonl"
    run = start_run(
        *arguments,
        "parallel.tensor_parallel_size=2",
        "train.num_steps=100000",
        "train.hang_timeout=30",
        mark=mark,
    )
    try:
        assert wait_until(lambda: run.poll() is not None or metrics.exists(), 800)
        assert run.poll() is None
        [rank] = [process for process in marked_processes(mark) if is_rank(process, 1)]
        rank.send_signal(end)
        output, _ = run.communicate(timeout=seconds)
        assert run.returncode == 1 and "rank 1" in output, output
        assert wait_until(lambda: not marked_processes(mark), 10)
    finally:
        for process in marked_processes(mark):
            process.kill()
        run.communicate()


def is_rank(process: psutil.Process, rank: int) -> bool:
    return process.environ().get("RANK") == str(rank) and "train" in process.cmdline()
