"""Small SentencePiece models, and texts that are hard to tokenize."""

from pathlib import Path
from typing import Any

import sentencepiece

CORPUS = [
    line
    for file in sorted(Path(__file__).parents[1].joinpath("checkpoint_convert").rglob("*.py"))
    for line in file.read_text().splitlines()
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
