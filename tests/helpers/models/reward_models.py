"""Tiny random reward models in Hugging Face folders, and their scores by `transformers`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
)

from helpers.models.tiny import EOS_ID, PAD_ID, character_tokenizer, make_random

STEP_TAG = "<start>"  # occurs in no text of a policy
TEMPLATE = (  # differs from the policy's template
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "dtype": "float32",
}


def reward_model_folder(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A Llama that scores a text by the logit of its only label."""
    config = LlamaConfig(**{**SIZES, "num_labels": 1, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    make_random(model, 0.1, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def process_model_folder(folder: Path) -> Path:
    """A process reward model like Qwen2.5-Math-PRM: a Qwen2 with an MLP of two labels."""
    torch.manual_seed(1)
    model = Qwen2Model(Qwen2Config(**SIZES))
    make_random(model, 0.1, torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    size = SIZES["hidden_size"]
    shapes = {"0.weight": (size, size), "0.bias": (size,), "2.weight": (2, size), "2.bias": (2,)}
    weights = {f"score.{name}": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    weights |= {f"model.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of both reward models."""
    made = character_tokenizer(SIZES["vocab_size"])
    made.chat_template = TEMPLATE
    return made


def rendered(prompt: str, completion: str, system: str | None = None) -> str:
    """A chat in the template of the reward models."""
    before = "" if system is None else f"[system] {system}<eos>"
    return f"{before}[user] {prompt}<eos>[assistant] {completion}<eos>"


@torch.inference_mode()
def reference_score(folder: Path, text: str) -> float:
    """The logit of the text by transformers in float32."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return float(model(torch.tensor([token_ids(folder, text)])).logits[0, 0])


@torch.inference_mode()
def reference_steps(folder: Path, text: str) -> list[float]:
    """The probability of the second label at each tag in the text."""
    weights = load_file(folder / "model.safetensors")
    model = Qwen2Model.from_pretrained(folder, dtype=torch.float32).eval()
    ids = token_ids(folder, text)
    hidden = model(torch.tensor([ids])).last_hidden_state[0]
    inner = torch.relu(hidden @ weights["score.0.weight"].T + weights["score.0.bias"])
    labels = inner @ weights["score.2.weight"].T + weights["score.2.bias"]
    [tag] = token_ids(folder, STEP_TAG)
    return labels[torch.tensor(ids) == tag].softmax(-1)[:, 1].tolist()


def token_ids(folder: Path, text: str) -> Sequence[int]:
    """The tokens of a text, by the tokenizer that vLLM and transformers load from a folder."""
    loaded = AutoTokenizer.from_pretrained(folder)  # the tokenizer loaded for a Qwen2 drops spaces
    return loaded(text, add_special_tokens=False)["input_ids"]
