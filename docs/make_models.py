"""Writes the table in docs/models.md: possible runs of each published model.

    PYTHONPATH=.:tests python docs/make_models.py

Each cell is the verdict of a run's checks on the model's config.json.
"""

import re
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
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import engine_dims, quantized_engine
from megatron_grpo.engines.support import check_attention, check_served
from megatron_grpo.policy.lora_targets import check_lora
from megatron_grpo.policy.transformer_engine import check_fp8_model
from parallel import ParallelDims

PAGE = Path(__file__).with_name("models.md")
TABLE = re.compile(r"\| model \|.*\nFurther families: [^\n]*\n", re.DOTALL)
SIZES = range(1, 17)
FEW = 8
"""Layers of a model when every matrix is checked: enough for one of each kind of layer."""
RUN_WITH_SGLANG = (
    *("deepseek_v3", "gemma3_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "kimi_k2", "llama"),
    *("mistral", "olmo3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
    *("deepseek_v32", "glm_moe_dsa", "qwen3_next"),
)
"""Families for which tests/sglang compares pushed weights with loaded ones."""
RUN_IN_FP8 = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3", "qwen3_moe")
"""Families for which tests/sglang compares quantised weights, too."""
ATTENTION = (("o_proj",), ("o_proj", "out_proj"))
"""One target in each layer, of attention since experts have no adapters."""
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
    """The ways of a model's adapters into engines."""
    fields = [LoraConfig(r=8, target_modules=names) for names in ATTENTION]
    if not any(is_accepted(check_lora, each, shape, 1) for each in fields):
        return "no"
    return "adapter" if is_accepted(check_adapters_served, shape) else "merged"


def mtp(shape: ModelShape) -> str:
    """The use of a model's layers for multi-token prediction."""
    if not shape.num_mtp_layers:
        return "-"
    return "trained" if shape.can_train_mtp else "kept"


def trained_in_fp8(shape: ModelShape, sizes: Sequence[int]) -> str:
    """Tensor-parallel sizes at which all matrices can be multiplied in FP8."""
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
        mtp(shape),
        ", ".join(schemes) or "no",
        trained_in_fp8(shape, sizes),
        sglang,
    ]


def replay(shape: ModelShape) -> str:
    """Choices of the engine that training can replay."""
    if shape.moe is None:
        return "-"
    replays = yes_if(check_served, rollout(router_replay=True), shape)
    chosen = rollout(engine="sglang", indexer_replay=True)
    return f"{replays}, indexers" if is_accepted(check_served, chosen, shape) else replays


def table() -> str:
    """Lines of the table, and families without a row."""
    rows = [
        [
            *("model", "family", "parameters", "trainer TP", "engine TP", "LoRA", "replay"),
            *("MTP", "8 bits", "FP8", "SGLang"),
        ]
    ]
    rows.append(["---"] * len(rows[0]))
    with tempfile.TemporaryDirectory() as folder:
        for name in PUBLISHED_MODELS:
            rows.append(row(write_config(Path(folder) / name, name)))
    seen = {cells[1] for cells in rows}
    others = ", ".join(f"`{name}`" for name in sorted(FAMILIES) if f"`{name}`" not in seen)
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return f"{lines}\n\nFurther families: {others}.\n"


def page() -> str:
    """The present page with a new table."""
    text, found = TABLE.subn(lambda _: table(), PAGE.read_text(encoding="utf-8"))
    assert found == 1, f"{PAGE} has no table to replace"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
