"""Loads the tokenizer of a model: tokenizer.json, or a SentencePiece model.

A tokenizer.json fully defines how text becomes tokens, so it is used unchanged: transformers'
`AutoTokenizer` would rebuild it as the class that tokenizer_config.json names, and Llama 2's then
splits text after a special token differently from its own file. A SentencePiece model is run by the
sentencepiece library: transformers would translate it, and without tokenizer_config.json would lose
the space in front of a text.
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import transformers
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from checkpoint_convert.sidecar import JSON_FILE, SENTENCEPIECE_FILE, tokenizer_file

_SPACE = "\u2581"  # sentencepiece's character for a space


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`: the first of tokenizer.json, tokenizer.model and vocab.json.

    Special tokens and chat template come from the other files of the folder. Raises ValueError if
    none exists or if the file, which the message names, is malformed.
    """
    file = tokenizer_file(Path(folder))
    try:
        # Without False, `AutoTokenizer` asks on the terminal whether to run code from the folder.
        return _class_for(file.name).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{file} cannot be loaded as a tokenizer: {error}") from error


def _class_for(name: str) -> Any:
    if name == JSON_FILE:
        return transformers.PreTrainedTokenizerFast
    if name == SENTENCEPIECE_FILE:
        return SentencePieceTokenizer
    # Lazily imported by this attribute: it takes five seconds, with torch and all generation code.
    return transformers.AutoTokenizer


class SentencePieceTokenizer(SentencePieceBackend):
    """A SentencePiece model with the interface of transformers.

    Text without special tokens becomes the ids that sentencepiece itself gives. Special tokens (the
    model's control pieces, and those that tokenizer_config.json adds) are found in the text, and
    the stretches between them are encoded one by one. Since sentencepiece puts a space in front of
    whatever it encodes, every stretch gets one; with `legacy: false` in tokenizer_config.json, only
    a stretch at the beginning of the text does.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as transformers has it

    def __init__(
        self,
        vocab_file: str,
        legacy: bool | None = None,
        add_bos_token: bool = True,
        add_eos_token: bool = False,
        **kwargs: Any,
    ) -> None:
        self._original = model = SentencePieceProcessor(model_file=vocab_file)
        for role in ("bos", "eos", "unk", "pad"):
            index = getattr(model, f"{role}_id")()
            if index >= 0:
                kwargs.setdefault(f"{role}_token", model.id_to_piece(index))
        added = [name for name, is_on in (("bos", add_bos_token), ("eos", add_eos_token)) if is_on]
        kwargs["special_tokens_pattern"] = "_".join(added) or "none"
        super().__init__(
            vocab_file=vocab_file,
            legacy=legacy is not False,  # older tokenizers lack the key
            add_bos_token=add_bos_token,
            add_eos_token=add_eos_token,
            **kwargs,
        )
        pieces = range(model.get_piece_size())
        control = [model.id_to_piece(index) for index in pieces if model.is_control(index)]
        self.add_tokens(control, special_tokens=True)
        normalizer = ModelProto.FromString(model.serialized_model_proto()).normalizer_spec
        # With `legacy: false`, transformers' `sp_model` puts no space in front of a text.
        self._is_prefixed_once = normalizer.add_dummy_prefix and not self.legacy

    def prepare_for_tokenization(self, text: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """With `legacy: false`, add a space in front, unless a special token begins the text."""
        begins_with_token = text.startswith(tuple(self.added_tokens_encoder))
        is_prefixed = self._is_prefixed_once and text and not begins_with_token
        return (_SPACE + text if is_prefixed else text), kwargs

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.sp_model.encode(text, out_type=str)

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """The text of pieces and special tokens, without the spaces that encoding put in front."""
        added = self.added_tokens_encoder
        text = ""
        for is_added, stretch in groupby(tokens, key=lambda token: token in added):
            if is_added:
                text += "".join(stretch)
            else:
                model = self.sp_model if text else self._original
                text += model.decode_pieces(list(stretch))
        return text
