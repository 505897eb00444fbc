"""Tiny random models in Hugging Face folders, with a tokenizer, for tests to load and train."""

import json
import re
import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from checkpoint_convert.families import FAMILIES
from parallel import ParallelDims

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<start>")
PAD_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}\n{{ message['content'] }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
CONFIGS: dict[str, Any] = {
    name: CONFIG_MAPPING[name] for name in FAMILIES if name in CONFIG_MAPPING
}
"""The config class of each family that transformers has."""
WHOLE_EXPERTS = ("gpt_oss",)
"""Families with experts that are never split over tensor ranks."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Families with sparse attention."""
LATENTS = ("deepseek_v3", "glm4_moe_lite", "kimi_k2", *INDEXED)
"""Families with latent attention."""
NEVER_TIED = (*LATENTS, "glm4_moe", "gpt_oss", "nemotron_h", "qwen3_next")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families with linear attention in most layers."""
NUM_MTP_LAYERS = "num_nextn_predict_layers"
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
WITH_SHARED = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
# Two value heads for each key head; two of three layers have linear attention.
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # Where a query is nearly orthogonal to the keys, the norm magnifies rounding errors: with
    # 1e-6, 4e-5 in transformers' own log-probabilities in float32.
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    },
}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
DEEPSEEK: dict[str, Any] = MLA | {
    "num_hidden_layers": 3,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_mtp_layers": 0,
}
# Fewer tokens than most sequences have, and so many heads that no two scores are zero.
SPARSE = DEEPSEEK | {
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
    "index_topk": 5,
    "index_n_heads": 16,
    "index_head_dim": 12,
}
TWO_ROPES = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in (("full_attention", 10_000.0), ("sliding_attention", 1_000.0))
}
# Fields that only one family has, or that it names differently.
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE | {"n_group": 1, "topk_group": 1, "indexer_rope_interleave": True},
    "gemma3_text": {
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "rope_parameters": TWO_ROPES,
    },
    "glm4_moe": EXPERTS
    | {
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
    },
    "glm4_moe_lite": MLA
    | EXPERTS
    | {
        "num_hidden_layers": 3,
        "v_head_dim": 24,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 256,
            "llama_4_scaling_beta": 0.0,
        }
    },
    "mistral": {"sliding_window": None},
    # Two heads for each group. transformers clamps steps to `time_step_min`; vLLM does not.
    "nemotron_h": EXPERTS
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 4,
        "ssm_state_size": 8,
        "time_step_min": 1e-30,
        "layer_norm_epsilon": 1e-3,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "olmo3": {"sliding_window": 6, "rope_parameters": TWO_ROPES},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | WITH_SHARED,
    "qwen3_next": LINEAR | WITH_SHARED | {"norm_topk_prob": True, "num_nextn_predict_layers": 0},
}


def no_dropout(family: str) -> dict[str, float]:
    """The config fields that switch off dropout, for families that train with it by default."""
    return {key: 0.0 for key in FAMILIES[family].defaults if key.endswith("_dropout")}


def tiny_model(
    folder: Path, family: str, *, tied: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """Save a random float32 model of `family` (a key of `CONFIGS`) and its tokenizer in `folder`.

    Its head is `tied` to the embedding, and heads share keys and values, where the family allows
    it. `overrides` are fields of the Hugging Face config. The vocabulary of 250 divides by neither
    4 nor 8, so that its padding over tensor-parallel ranks is exercised.
    """
    if family == "kimi_k2":
        overrides = {"n_group": 1, "topk_group": 1} | overrides
        return renamed(tiny_model(folder, "deepseek_v3", seed=seed, **overrides), family)
    shape: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 250,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "initializer_range": 0.1,
        "tie_word_embeddings": tied and family not in NEVER_TIED,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
    }
    # Qwen2's head size is hidden_size / num_heads; latent attention names the parts of a head.
    if family not in ("qwen2", *LATENTS):
        shape["head_dim"] = 16
    shape |= no_dropout(family) | OWN_FIELDS.get(family, {}) | overrides
    if family in LATENTS:  # latent attention has keys and values for every head
        shape["num_key_value_heads"] = shape["num_attention_heads"]
    if family == "minimax_m2":
        shape["rotary_dim"] = shape["head_dim"] // 2
    if (blocks := shape.get("layers_block_type")) and "num_hidden_layers" in overrides:
        shape["layers_block_type"] = [*islice(cycle(blocks), shape["num_hidden_layers"])]
    config = CONFIGS[family](**deepcopy(shape))  # config classes change their arguments
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_random(model, config.initializer_range, generator)
    model.save_pretrained(folder)
    character_tokenizer(config.vocab_size).save_pretrained(folder)
    return Path(folder)


def mesh_for(family: str, dims: ParallelDims) -> ParallelDims:
    """`dims`, with whole experts for a family in `WHOLE_EXPERTS`."""
    return replace(dims, expert_tensor=1) if family in WHOLE_EXPERTS else dims


def talkative(folder: Path, model: Path) -> Path:
    """Copy a model and add so many end tokens that a random turn is short."""
    shutil.copytree(model, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        config["eos_token_id"] = [EOS_ID, *range(40, 100)]
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
    return folder


@torch.no_grad()
def make_random(model: torch.nn.Module, scale: float, generator: torch.Generator) -> None:
    """Replace all constants of transformers' initialisation by distinct values."""
    for name, parameter in model.named_parameters():
        # Norms start at 1, biases at 0: a mix-up would go unnoticed.
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        if name.endswith(".A_log"):  # or linear attention would forget nearly all after one token
            parameter -= 3
    for name, values in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values += 0.05 * torch.randn(values.shape, generator=generator)
    # transformers zeroes the padding token's embedding, and at 0 RMSNorm has a huge gradient.
    padding = model.get_input_embeddings().weight[PAD_ID]
    padding.copy_(scale * torch.randn(padding.shape, generator=generator))


def renamed(folder: Path, family: str) -> Path:
    """Give the model in `folder` a `model_type` that transformers does not know."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"model_type": family}
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def servable_model(folder: Path, family: str, **overrides: Any) -> Path:
    """A model with head size 32, the least that vLLM serves on CPUs (Qwen2: by its hidden size),
    or with the only latent size that vLLM serves on CPUs."""
    heads = {"qwen2": {"hidden_size": 128}}.get(family, {"head_dim": 32})
    if family == "gpt_oss":  # a multiple of 32 for each of four workers
        heads["intermediate_size"] = 128
    if family in LATENTS:
        heads = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    if family in INDEXED:
        heads["index_head_dim"] = 128
    return tiny_model(folder, family, **(heads | overrides))


def mixture_of_blocks(folder: Path, family: str, seed: int = 0, **sizes: Any) -> Path:
    """A mixture that two workers or tensor ranks split between blocks of 128 rows and columns."""
    rows = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    if family in LATENTS:
        rows |= {"q_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
    else:
        rows |= {"num_key_value_heads": 4, "head_dim": 64}
    return servable_model(folder, family, seed=seed, **rows | sizes)


def character_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per character; ids: special tokens, newline, ASCII, then Latin to `vocab_size`."""
    characters = ["\n", *map(chr, range(0x20, 0x7F)), *map(chr, range(0xA1, 0xA1 + vocab_size))]
    vocabulary = [*SPECIAL_TOKENS, *characters][:vocab_size]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<start>"],
        chat_template=CHAT_TEMPLATE,
    )


def stacked_experts(model: Path, folder: Path) -> Path:
    """Copy a model with stacked experts, gate above up, as Qwen3.5 is published."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    parts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(weights):
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(.*)\.weight", name):
            parts.setdefault(".".join(match.groups()), []).append(weights.pop(name))
    for name, each in parts.items():
        weights[name] = torch.stack(each)
    for name in [name for name in parts if name.endswith(".gate_proj")]:
        block = name.removesuffix(".gate_proj")
        both = [weights.pop(f"{block}.{half}_proj") for half in ("gate", "up")]
        weights[f"{block}.gate_up_proj"] = torch.cat(both, 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def add_mtp_layer(folder: Path, seed: int = 7, norm: float = 0.0) -> Path:
    """Add an MTP layer with the tensors of published models: numbered after the last layer, or
    under "mtp." in a hybrid. Weights of its norms are near `norm`; a hybrid adds 1 to a norm's
    weight, so there they are near 0. Returns the folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers" if "qwen3_5" in text["model_type"] else NUM_MTP_LAYERS] = 1
    size, is_apart = text["hidden_size"], text["model_type"] in HYBRIDS
    weights, own = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    last = max(name for name in weights if name.endswith("self_attn.o_proj.weight"))
    last = last.removesuffix("self_attn.o_proj.weight")
    sizes = {name.removeprefix(last): each.shape for name, each in weights.items() if last in name}
    if is_apart:
        sizes = {f"mtp.layers.0.{name}": shape for name, shape in sizes.items()}
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        sizes |= {f"mtp.{name}.weight": (size,) for name in norms}
        sizes |= {"mtp.fc.weight": (size, 2 * size)}
    else:
        sizes |= dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (size,))
        sizes |= {"eh_proj.weight": (size, 2 * size)}
        sizes |= dict.fromkeys(
            ("embed_tokens.weight", "shared_head.head.weight"), (config["vocab_size"], size)
        )
        layer = f"model.layers.{config['num_hidden_layers']}."
        sizes = {layer + name: shape for name, shape in sizes.items()}
    for name, shape in sizes.items():
        near = norm * (name.endswith("norm.weight") and not is_apart)
        weights[name] = 0.02 * torch.randn(shape, generator=own) + near
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


if __name__ == "__main__":
    # The model of configs/tiny_cpu.yaml, or one of other sizes (hidden_size=256); 32 is the least
    # head size that vLLM serves on a CPU.
    sizes = {name: int(value) for name, value in (word.split("=") for word in sys.argv[2:])}
    tiny_model(Path(sys.argv[1]), "qwen3", **{"head_dim": 32} | sizes)


# Small SentencePiece models, and texts that are hard to tokenize.

CORPUS = [
    line
    for file in sorted(Path(__file__).parents[3].joinpath("checkpoint_convert").rglob("*.py"))
    for line in file.read_text(encoding="utf-8").splitlines()
    if line
]
TEXTS = [
    "Hello world",
    " leading",
    "  two leading",
    "trailing  ",
    "two  spaces\nnew\n\nline",
    "\ttab",
    "naïve café 你好 🚀🦙",
    "e\u0301 \ufb01 \u200b",
    "3 33 333",
    "def f(x):\n    return x + 1\n",
    " ",
    "\n",
    "     ",
    "",
]


def train(folder: Path, kind: str, **options: Any) -> Path:
    """Train a model of `kind` (bpe, unigram) with Llama 2's settings and save it in `folder`."""
    settings: dict[str, Any] = {
        "vocab_size": 700,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": -1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / kind),
        model_type=kind,
        **settings | options,
    )
    return folder / f"{kind}.model"
