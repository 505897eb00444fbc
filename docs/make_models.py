"""Writes docs/models.md: what a run can do with each published model.

    PYTHONPATH=.:tests python docs/make_models.py

Each cell is what the checks before a run say of the model's config.json.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from checkpoint_convert import ModelShape, check_divisible, hf_tensors, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.hf_config import has_other_towers
from checkpoint_convert.vllm import engine_sizes
from checkpoint_convert.vllm_lora import check_adapters_served
from helpers.models.published import PUBLISHED_MODELS, write_config
from megatron_grpo.config.grpo import GRPOConfig, check_shared_prompts
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import engine_dims, quantized_engine
from megatron_grpo.engines.support import check_attention, check_served
from megatron_grpo.policy.lora_targets import check_lora
from megatron_grpo.policy.transformer_engine import check_fp8_model
from parallel import ParallelDims

PAGE = Path(__file__).with_name("models.md")
HEAD = """# Models

What a run can do with a model, by what the checks before its start say of its config.json;
`megatron-grpo check CONFIG` says it of another model, and why not. This page is made by
`PYTHONPATH=.:tests python docs/make_models.py`. Where nothing is said, a family trains under
every combination of tensor, sequence, pipeline, context, expert and data parallelism, with shared
prompts. That every vLLM worker holds what vLLM loads itself is tested for every family
(`tests/checkpoint_convert/test_vllm.py`), and that exports of imports are the same to the bit
(`tests/checkpoint_convert/test_megatron_to_hf.py`).

- **trainer TP**, **engine TP**: tensor-parallel sizes to 16 that can split it; of a mixture, with
  `expert_tensor_parallel_size` 1, which `gpt_oss` needs, and engines without
  `enable_expert_parallel` (of SGLang, `ep_size`).
- **LoRA**: `lora.sync`: `adapter`, whose pushes carry adapters alone, or only `merged`.
- **replay**: `rollout.router_replay`, of a mixture; `indexers`: `rollout.indexer_replay` as well.
- **shared prompts**: `grpo.shared_prompts`.
- **MTP**: whether its layer for multi-token prediction is trained, if it is published with one, or
  only kept in exports.
- **8 bits**: the schemes of `rollout.quantization` in which vLLM serves it, at a tensor-parallel
  size of 1.
- **FP8**: whether sizes and attention allow `model.megatron.fp8`, [training in
  FP8](low-precision.md#training-in-fp8), or the tensor-parallel sizes at which they do; in brackets
  for `mxfp8`, if that differs.
- **SGLang**: `rollout.engine: sglang`, and `fp8` if it serves that as well, at a tensor-parallel
  size of 1, and pushes in it were compared for the family.

Log-probabilities and all gradients of every family equal those of transformers
(`tests/megatron_grpo/policy/test_model.py`): in float64 on one rank to 1e-12, and in float32 at
every kind of layout to 1e-5.

Of a multimodal model the family and all numbers are those of its text tower. That of Kimi-K2.5 is
`kimi_k2`, whose experts are published in INT4, which is refused: convert them to bfloat16 first.
Qwen2.5-VL (`qwen2`) and Qwen3-VL (`qwen3`, or `qwen3_moe`) learn from
[images](images.md), too, with vLLM and SGLang.

Linear attention (Qwen3-Next, Qwen3.5) and Mamba-2 are computed in torch, and in layers of
Transformer Engine by kernels of flash-linear-attention where `pip install -e '.[hybrid]'` has
installed them beside the trainer. The line `layers:` at the start of a run says which of both
computes, such as `GatedDeltaNet (flash-linear-attention)`, and
`model.megatron.transformer_impl: local` chooses torch. With kernels, products are in `model.dtype`
with sums in float32, as in the engines, where torch has float32; decays, and memories from chunk to
chunk, are in float32 in both. The first steps wait for Triton's compiler. Mamba-2 has a kernel of
this package as well: that of mamba-ssm has no memories before packed sequences, which
`grpo.shared_prompts` needs, and its release imports only with CUDA sources that were compiled. Its
layers make the host wait for the GPU, once in a forward and twice in a backward. No GPU has run any
of these kernels; Triton's interpreter has, on a CPU, in float32 and float16 (it has no bfloat16).
`pytest tests/gpu/test_gpu_linear_attention.py` compares them with torch.

Mamba-2 (Nemotron-H, Nemotron 3 Nano): each layer has one module, of Mamba-2, attention without
RoPE, an MLP or experts, the last two without gates. `lora.r`, 8 bits (`rollout.quantization`),
speculative decoding, `rollout.router_replay`, `rollout.recompute_kv_cache: false` and
`rollout.weight_transport: disk` are refused, and so are experts of latents and layers for
multi-token prediction, with which Nemotron 3 Super is published. vLLM serves experts without gates
on GPUs only, where none of this has been run: what its workers load is compared on a CPU, with
other kernels in their place. Its routers are in the model's dtype on GPUs of compute capability 9.0
and 10.x, as pushes bring them; on others, where they are float32, engines are refused unless
`model.dtype` is that, too. transformers lets no step of Mamba-2 be below `time_step_min`; vLLM and
the trainer do.

Sparse attention (DeepSeek-V3.2, GLM-5): indexers choose the tokens that attention sees, and stay
as they were read, in training, pushes and exports. DeepSeek trains them by a loss of their own
(arXiv 2512.02556, section 2.1), which is not here. `grpo.shared_prompts`, 8 bits
(`rollout.quantization`, `model.megatron.fp8`), speculative decoding and
`rollout.recompute_kv_cache: false` are refused, and so are models whose layers share what one
indexer chose. vLLM and SGLang serve sparse attention on GPUs only, where none of this has been run:
what their workers load is compared on a CPU, without kernels for it, SGLang's log-probabilities
where all tokens are chosen, too, and a generation was made by the engine on top of transformers
that tests have (`tests/reference_engine`). Both serve it in bfloat16 and on GPUs of compute
capability 9.0 or more, SGLang with an `index_topk` of 2,048 and an `index_head_dim` of 128: other
models, dtypes and GPUs are refused, and so are
SGLang's `attention_backend` (also `prefill_` and `decode_attention_backend`), with which its
attention would be dense, and `enable_deterministic_inference`. SGLang caches keys and values in
bfloat16 unless `rollout.sglang.kv_cache_dtype` says otherwise.

Engines score in 8 bits and the trainer in float32, so they may choose other tokens where two scores
are close. Of at most `index_topk` tokens all are chosen, and nothing differs. Of more,
`rollout/logprob_gap_mean` tells what it does to log-probabilities, for which
`grpo.rollout_importance_sampling_mode` corrects. `rollout.indexer_replay: true` prevents it: in the
pass for `old_logprobs` and in training, each token attends to the tokens that the engine chose for
it, at every layout and with every kind of recomputation, beside `rollout.router_replay` or without.
As [routes](algorithms.md#mixtures-of-experts), choices are kept through turns, branches and
checkpoints; the reference and evaluations choose themselves.

- **When it pays**: if the gap of completions beyond `index_topk` tokens is well above that of
  shorter ones, and a correction does not do. In a random model of four layers with 3 of 8 experts
  and 5 tokens for each, in bfloat16, both replays lower its mean from 0.22 to 0.012
  (`pytest -m slow tests/megatron_grpo/policy/test_router.py -k rounding`); how much of it choices
  among thousands of tokens make up was not measured.
- **What it costs**: for each token of prompt and completion 250 kB of DeepSeek-V3.2 (2,048 numbers
  of 2 bytes in 61 layers; of GLM-5 320 kB; twice that if sequences may have more than 32,768
  tokens), where routes take 488 bytes, and a third more as text of the answer. All of it passes
  through rank 0: 64 completions of 8,192 tokens bring 131 GB, and 512 of 16,384 2.1 TB. A rank gets
  those of its data rank for an optimizer batch on its host, and keeps those of its own tokens and
  layers on its GPU. `plan` says how much all of it is.
- **Engines**: it was run with the reference engine of tests. vLLM 0.32 returns none, and is
  refused. SGLang 0.5.23 returns them on CUDA, if each worker has all heads of attention: in an
  engine of one GPU, or of several groups of one worker (`rollout.data_parallel_size`, without
  `rollout.router_replay`; what these load was compared on a CPU, a push was not tried). It keeps 4
  bytes for each number in
  page-locked memory for every token of its cache (500 GB for a million:
  `rollout.sglang.max_total_tokens`), and 4 GB of a GPU for 8,192 tokens of prompts that are read at
  a time (`rollout.sglang.chunked_prefill_size`). Written by its source; no GPU has run it (`pytest
  tests/gpu/test_gpu_engine.py -k indexers`).
- **Its answers are checked**: a number that is not a position up to the token's own ends the run.
  SGLang tells positions with `SGLANG_DSA_FUSE_TOPK=0`, which the trainer sets for its engines, and
  else places in its cache. What it tells of a token that sees no more than `index_topk` is not
  looked at.
- `rollout.in_flight_updates` is refused: SGLang drops the choices of a completion that a push
  interrupts. So it does where its cache is full and a completion waits for room: that one has the
  choices with which its tokens were read again.

Newer families that transformers 5.19 or vLLM 0.32 has are refused by name, as they differ in more
than flags: DeepSeek-V4 (compressed attention, hyper-connections, experts chosen by hashes),
Qwen4-exp (hyper-connections, an indexer, embeddings of n-grams and of layers), GLM-5-Next and
Kimi-Linear (linear attention that forgets by channel), MiniMax-M3 (an indexer for grouped queries),
Mistral 4, also as the text of a `mistral3` (latent attention whose queries grow with their
position), Gemma 4 (embeddings of layers, keys that are values, or shared by layers), MiMo-V2-Flash
and Laguna (numbers of heads that differ from layer to layer). Qwen3.6 is published as Qwen3.5.
"""
SIZES = range(1, 17)
FEW = 8
"""Layers that checks of every matrix are asked of: these have one of each kind that a model has."""
RUN_WITH_SGLANG = (
    *("deepseek_v3", "gemma3_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "kimi_k2", "llama"),
    *("mistral", "olmo3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
    *("deepseek_v32", "glm_moe_dsa", "qwen3_next"),
)
"""Families of which tests/sglang compares pushed weights with loaded ones."""
RUN_IN_FP8 = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3", "qwen3_moe")
"""Those of which it compares quantised ones, too."""
ATTENTION = (("o_proj",), ("o_proj", "out_proj"))
"""Modules that each layer has one of, as experts have no adapters."""
SCHEMES = ("fp8", "fp8_channel", "int8")


def is_accepted(check: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a check raises no ValueError."""
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


def yes_if(check: Callable[..., Any], *arguments: Any) -> str:
    """The cell of a check."""
    return "yes" if is_accepted(check, *arguments) else "no"


def rollout(**settings: Any) -> RolloutConfig:
    """A section `rollout` with these settings."""
    return RolloutConfig(max_completion_length=16, **settings)


def lora(shape: ModelShape) -> str:
    """How a model may have adapters."""
    fields = [LoraConfig(r=8, target_modules=names) for names in ATTENTION]
    if not any(is_accepted(check_lora, each, shape, 1) for each in fields):
        return "no"
    return "adapter" if is_accepted(check_adapters_served, shape) else "merged"


def mtp(shape: ModelShape) -> str:
    """What is done with its layers for multi-token prediction."""
    if not shape.num_mtp_layers:
        return "-"
    return "trained" if shape.can_train_mtp else "kept"


def trained_in_fp8(shape: ModelShape, sizes: Sequence[int]) -> str:
    """At which of the tensor-parallel sizes its matrices can be multiplied in FP8."""
    cells = []
    for recipe in ("blockwise", "mxfp8"):
        fields = {"fp8": "e4m3", "fp8_recipe": recipe}
        able = [
            size
            for size in sizes
            if is_accepted(
                check_fp8_model, fields, shape, ParallelDims(tensor=size, expert_tensor=1)
            )
        ]
        all_of_them = {(): "no", tuple(sizes): "yes"}
        cells.append(all_of_them.get(tuple(able), ", ".join(map(str, able))))
    return cells[0] if cells[0] == cells[1] else f"{cells[0]} ({cells[1]})"


def row(folder: Path) -> list[str]:
    """The cells of the model in a folder of its name."""
    shape = read_shape(folder)
    few = replace(shape, num_layers=min(shape.num_layers, FEW))
    billions = sum(map(prod, hf_tensors(shape).values())) / 1e9
    sizes = [
        size
        for size in SIZES
        if is_accepted(check_divisible, shape, ParallelDims(tensor=size, expert_tensor=1))
    ]
    served = [size for size in engine_sizes(shape, engine_dims(rollout())) if size in SIZES]
    schemes = [
        scheme
        for scheme in SCHEMES
        if is_accepted(quantized_engine, rollout(quantization=scheme), few, "bfloat16")
    ]
    grpo = GRPOConfig(generation_batch_size=8, num_generations=8, shared_prompts=True)
    in_fp8 = rollout(engine="sglang", quantization="fp8")
    served_in_fp8 = is_accepted(quantized_engine, in_fp8, few, "bfloat16")
    sglang = "yes, fp8" if served_in_fp8 and shape.family in RUN_IN_FP8 else "yes"
    sglang = sglang if shape.family in RUN_WITH_SGLANG else "not tried"
    sglang = "on GPUs" if shape.linear or shape.indexer else sglang
    if has_other_towers(folder):
        schemes, sglang = [], sglang.removesuffix(", fp8")
    if not is_accepted(check_attention, "sglang", shape):
        sglang = "no: Mamba-2" if shape.linear else "no: windows"
    return [
        folder.name,
        f"`{shape.family}`",
        f"{billions:.1f}B" if billions < 10 else f"{billions:.0f}B",
        ", ".join(map(str, sizes)),
        ", ".join(map(str, served)),
        lora(few),
        replay(shape),
        yes_if(check_shared_prompts, grpo, shape),
        mtp(shape),
        ", ".join(schemes) or "no",
        trained_in_fp8(shape, sizes),
        sglang,
    ]


def replay(shape: ModelShape) -> str:
    """What of an engine's choices can be trained with."""
    if shape.moe is None:
        return "-"
    replays = yes_if(check_served, rollout(router_replay=True), shape)
    chosen = rollout(engine="sglang", indexer_replay=True)
    return f"{replays}, indexers" if is_accepted(check_served, chosen, shape) else replays


def page() -> str:
    """The text of docs/models.md."""
    rows = [
        [
            *("model", "family", "parameters", "trainer TP", "engine TP", "LoRA", "replay"),
            *("shared prompts", "MTP", "8 bits", "FP8", "SGLang"),
        ]
    ]
    rows.append(["---"] * len(rows[0]))
    with tempfile.TemporaryDirectory() as folder:
        for name in PUBLISHED_MODELS:
            rows.append(row(write_config(Path(folder) / name, name)))
    seen = {cells[1] for cells in rows}
    others = ", ".join(f"`{name}`" for name in sorted(FAMILIES) if f"`{name}`" not in seen)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return f"{HEAD}\n{table}\n\nFurther families: {others}.\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
