"""Loads the tokenizer of a model: tokenizer.json, or a SentencePiece model.

A tokenizer.json fully defines how text becomes tokens, so it is used unchanged: transformers'
`AutoTokenizer` would rebuild it as the class that tokenizer_config.json names, and Llama 2's then
splits text after a special token differently from its own file. A SentencePiece model is run by the
sentencepiece library: transformers would translate it, and without tokenizer_config.json would lose
the space in front of a text.
"""

import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import transformers
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase

JSON_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
# Byte-level BPE in two files, the format in which Qwen2 was published.
_VOCABULARY_FILE = "vocab.json"
_SPACE = "\u2581"  # sentencepiece's character for a space


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder `source`, or of the SentencePiece model file `source`.

    Uses the first file that exists of tokenizer.json, tokenizer.model and vocab.json; special
    tokens and chat template come from the other files of the folder. Raises ValueError if none
    exists or if the file, which the message names, is malformed.
    """
    source = Path(source)
    if source.is_file():
        return _load(SentencePieceTokenizer, source, source)
    for name in (JSON_FILE, SENTENCEPIECE_FILE, _VOCABULARY_FILE):
        if (source / name).is_file():
            return _load(_class_for(name), source, source / name)
    raise ValueError(
        f"{source} has no tokenizer: none of {JSON_FILE}, {SENTENCEPIECE_FILE} and "
        f"{_VOCABULARY_FILE} is there"
    )


def _class_for(name: str) -> Any:
    if name == JSON_FILE:
        return transformers.PreTrainedTokenizerFast
    if name == SENTENCEPIECE_FILE:
        return SentencePieceTokenizer
    # Lazily imported by this attribute: it takes five seconds, with torch and all generation code.
    return transformers.AutoTokenizer


def _load(tokenizer_class: Any, source: Path, file: Path) -> PreTrainedTokenizerBase:
    try:
        if source == file:
            return tokenizer_class(vocab_file=str(file))
        # Without False, `AutoTokenizer` asks on the terminal whether to run code from the folder.
        return tokenizer_class.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{file} cannot be loaded as a tokenizer: {error}") from error


class SentencePieceTokenizer(PreTrainedTokenizer):
    """A SentencePiece model with the interface of transformers.

    Text without special tokens becomes the ids that sentencepiece itself gives. Special tokens (the
    model's control pieces, and those that tokenizer_config.json adds) are found in the text, and
    the stretches between them are encoded one by one. Since sentencepiece puts a space in front of
    whatever it encodes, every stretch gets one; with `legacy: false` in tokenizer_config.json, only
    a stretch at the beginning of the text does.
    """

    vocab_files_names = {"vocab_file": SENTENCEPIECE_FILE}  # noqa: RUF012 - as transformers has it
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str,
        legacy: bool | None = None,
        add_bos_token: bool = True,
        add_eos_token: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_file = vocab_file
        self.add_bos_token = add_bos_token
        self.add_eos_token = add_eos_token
        self._model = SentencePieceProcessor(model_file=str(vocab_file))
        self._unprefixed = self._model
        self._is_prefixed_once = False
        if legacy is False:  # older tokenizers lack the key
            self._unprefixed, self._is_prefixed_once = _without_prefix(self._model)
        pieces = range(self._model.get_piece_size())
        self._pieces = [self._model.id_to_piece(index) for index in pieces]
        for role in ("bos", "eos", "unk", "pad"):
            index = getattr(self._model, f"{role}_id")()
            if index >= 0:
                kwargs.setdefault(f"{role}_token", self._pieces[index])
        super().__init__(
            legacy=legacy, add_bos_token=add_bos_token, add_eos_token=add_eos_token, **kwargs
        )
        control = [self._pieces[index] for index in pieces if self._model.is_control(index)]
        self.add_tokens(control, special_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of pieces, excluding tokens added in tokenizer_config.json."""
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        """Id of every piece and added token."""
        pieces = {piece: index for index, piece in enumerate(self._pieces)}
        return {**pieces, **self.added_tokens_encoder}

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """One text or two, each with the BOS and EOS tokens that the tokenizer is set to add."""
        before = [self.bos_token_id] if self.add_bos_token else []
        after = [self.eos_token_id] if self.add_eos_token else []
        texts = [token_ids_0] if token_ids_1 is None else [token_ids_0, token_ids_1]
        return [index for ids in texts for index in (*before, *ids, *after)]

    def prepare_for_tokenization(self, text: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """With `legacy: false`, add a space in front, unless a special token begins the text."""
        is_prefixed = self._is_prefixed_once and text and not self._begins_with_token(text)
        return (_SPACE + text if is_prefixed else text), kwargs

    def _begins_with_token(self, text: str) -> bool:
        return text.startswith(tuple(self.added_tokens_encoder))

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self._unprefixed.encode(text, out_type=str)

    def _convert_token_to_id(self, token: str) -> int:
        return self._model.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """The text of pieces and special tokens, without the spaces that encoding put in front."""
        added = self.added_tokens_encoder
        text = ""
        for is_added, stretch in groupby(tokens, key=lambda token: token in added):
            if is_added:
                text += "".join(stretch)
            else:
                model = self._unprefixed if text else self._model
                text += model.decode_pieces(list(stretch))
        return text

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str]:
        """Copy the model file to `save_directory`."""
        name = f"{filename_prefix}-{SENTENCEPIECE_FILE}" if filename_prefix else SENTENCEPIECE_FILE
        file = Path(save_directory) / name
        if not (file.exists() and file.samefile(self.vocab_file)):
            shutil.copyfile(self.vocab_file, file)
        return (str(file),)


def _without_prefix(model: SentencePieceProcessor) -> tuple[SentencePieceProcessor, bool]:
    """The same model without the space in front of texts, and whether the original adds one."""
    proto = ModelProto.FromString(model.serialized_model_proto())
    puts_space = proto.normalizer_spec.add_dummy_prefix
    proto.normalizer_spec.add_dummy_prefix = False
    return SentencePieceProcessor(model_proto=proto.SerializeToString()), puts_space
