"""Tiny random multimodal models in Hugging Face folders; tests train their text tower."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.gemma3 import Gemma3Config
from transformers.models.kimi_k25 import Kimi_K25Config
from transformers.models.mistral3 import Mistral3Config
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig
from transformers.models.qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig

from checkpoint_convert.layer_types import FULL, WINDOWED
from helpers.models.tiny import (
    DEEPSEEK,
    EOS_ID,
    LINEAR,
    OWN_FIELDS,
    PAD_ID,
    character_tokenizer,
    make_random,
)

TEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 250,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
CONFIGS = {
    "gemma3": Gemma3Config,
    "kimi_k25": Kimi_K25Config,
    "mistral3": Mistral3Config,
    "qwen2_5_vl": Qwen2_5_VLConfig,
    "qwen3_5": Qwen3_5Config,
    "qwen3_5_moe": Qwen3_5MoeConfig,
    "qwen3_vl": Qwen3VLConfig,
    "qwen3_vl_moe": Qwen3VLMoeConfig,
}
OF_QWEN3_5 = {
    **LINEAR,
    "head_dim": 32,
    "rope_parameters": {
        **LINEAR["rope_parameters"],
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
OF_QWEN3_VL = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6], "mrope_interleaved": True},
}
OWN_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 32, "sliding_window": 20, "layer_types": [WINDOWED, WINDOWED, FULL]},
    # The only latent size that vLLM serves on CPUs.
    "kimi_k25": DEEPSEEK
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "rope_parameters": ROPE,
    },
    "mistral3": {
        "model_type": "mistral",
        "head_dim": 32,
        "sliding_window": None,
        "rope_parameters": ROPE,
    },
    # Head size 32 is the least that vLLM serves on CPUs.
    "qwen2_5_vl": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]},
    },
    "qwen3_5": OF_QWEN3_5,
    "qwen3_5_moe": OWN_FIELDS["qwen3_5_moe_text"] | OF_QWEN3_5,
    "qwen3_vl": OF_QWEN3_VL,
    "qwen3_vl_moe": OWN_FIELDS["qwen3_moe"] | OF_QWEN3_VL,
}
SIZES = {"hidden_size": 32, "intermediate_size": 64}
ONE_LAYER = SIZES | {"num_hidden_layers": 1, "num_attention_heads": 2}
OF_QWEN = SIZES | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
POSITIONS = OF_QWEN | {"num_position_embeddings": 16}
# Three levels, so that both stages of a pipeline (two of four layers each) add some.
DEEPSTACK = POSITIONS | {"depth": 4, "deepstack_visual_indexes": [0, 1, 3]}
PATCHES = {"image_size": 28, "patch_size": 14}
VISION: dict[str, dict[str, Any]] = {
    "gemma3": ONE_LAYER | PATCHES,
    "kimi_k25": ONE_LAYER,
    "mistral3": ONE_LAYER | PATCHES | {"model_type": "pixtral", "head_dim": 16},
    "qwen2_5_vl": OF_QWEN | {"out_hidden_size": 128, "fullatt_block_indexes": [0]},
    "qwen3_5": POSITIONS | {"deepstack_visual_indexes": []},
    "qwen3_5_moe": POSITIONS,
    "qwen3_vl": DEEPSTACK,
    "qwen3_vl_moe": DEEPSTACK,
}


# Fields of Kimi-K2.5's image processor that vLLM reads even if it serves only text.
OF_KIMI_IMAGES = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "in_patch_limit": 256,
    "in_patch_limit_each_frame": 256,
    "in_patch_limit_video": None,
    "patch_limit_on_one_side": 64,
    "fixed_output_tokens": None,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def tiny_multimodal(
    folder: Path, model_type: str, *, tied: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """Save a random float32 model of `model_type` (a key of `CONFIGS`) in `folder`; `overrides` are
    fields of its `text_config`."""
    text = {**TEXT, **OWN_TEXT[model_type], "tie_word_embeddings": tied, **overrides}
    # Image tokens lie beyond the ids that tests draw. Kimi-K2.5's lie beyond the vocabulary, since
    # transformers embeds them as token 0, and vLLM as themselves.
    last = 252 if model_type == "kimi_k25" else 250
    images = {f"{x}_token_id": last - n for n, x in enumerate(("video", "image"), start=1)}
    if model_type == "gemma3":
        images["mm_tokens_per_image"] = 4
    fields = {"text_config": text, "vision_config": VISION[model_type], **images}
    config = CONFIGS[model_type](tie_word_embeddings=tied, **deepcopy(fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    make_random(model, TEXT["initializer_range"], generator)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(as_published(weights, model_type), folder / "model.safetensors", {"format": "pt"})
    character_tokenizer(TEXT["vocab_size"]).save_pretrained(folder)
    if model_type == "kimi_k25":
        processor = json.dumps({"media_proc_cfg": OF_KIMI_IMAGES})
        (folder / "preprocessor_config.json").write_text(processor, encoding="utf-8")
        published = {"architectures": ["KimiK25ForConditionalGeneration"]}
        values = json.loads((folder / "config.json").read_text(encoding="utf-8")) | published
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return Path(folder)


def as_published(weights: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Weights that transformers has saved, in the form in which publishers store them.

    Experts of a Qwen3-VL are published transposed, which is the only form that vLLM reads.
    transformers' names of Kimi-K2.5's text layers and of two modules of its tower differ from the
    published ones.
    """
    if model_type == "qwen3_vl_moe":
        return {
            name: each.mT.contiguous() if ".experts." in name else each
            for name, each in weights.items()
        }
    if model_type == "kimi_k25":
        renamed = {
            "language_model.model.blocks.": "language_model.model.layers.",
            "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
            "model.mm_projector.": "mm_projector.",
        }
        for old, new in renamed.items():
            weights = {name.replace(old, new): each for name, each in weights.items()}
    return weights
