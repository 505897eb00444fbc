"""Converts the tokenizer in the metadata of a GGUF file to the files of a Hugging Face folder.

A tokenizer with scores (`llama`) becomes the SentencePiece model that it was made from; one with
merges (`gpt2`) becomes a tokenizer.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from checkpoint_convert.config_values import boolean
from checkpoint_convert.formats.gguf_header import GgufHeader

# Values of `tokenizer.ggml.token_type`, the same as in SentencePiece.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre`, which selects how text is split before merging -> our name for it.
_SPLITTERS = {
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "smaug-bpe": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_INSTEAD = (
    "put config.json and the tokenizer files of the original model in a folder, and give it with "
    "--hf-config"
)


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write tokenizer files into `folder`.

    Raises ValueError for an unsupported kind of tokenizer or way of splitting text, and for
    metadata that is missing or has the wrong type, naming the key.
    """
    kind = header.get("tokenizer.ggml.model")
    writers: dict[str, Callable[[GgufHeader, Path], None]] = {
        "llama": _write_sentencepiece,
        "gpt2": _write_merges,
    }
    if kind not in list(writers):  # a list, as the value may be unhashable
        raise ValueError(
            f"{header.path} has a tokenizer of kind {kind!r}, supported: {sorted(writers)}; "
            f"{_INSTEAD}"
        )
    writers[kind](header, folder)


def _write_sentencepiece(header: GgufHeader, folder: Path) -> None:
    tokens = _list(header, "tokens", str)
    scores = _list(header, "scores", float, len(tokens))
    types = _list(header, "token_type", int, len(tokens))
    model = ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        # llama.cpp stores user-defined tokens with plain spaces.
        piece = token.replace(" ", "\u2581") if kind == _USER_DEFINED else token
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = TrainerSpec.BPE
    model.trainer_spec.vocab_size = len(tokens)
    model.trainer_spec.byte_fallback = "<0x00>" in tokens
    for role, name in _special_tokens(header).items():
        setattr(model.trainer_spec, f"{role}_id", tokens.index(name))
        setattr(model.trainer_spec, f"{role}_piece", name)
    puts_space = _flag(header, "add_space_prefix", True)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = puts_space
    model.normalizer_spec.remove_extra_whitespaces = _flag(
        header, "remove_extra_whitespaces", False
    )
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": _flag(header, "add_bos_token", True),
        "add_eos_token": _flag(header, "add_eos_token", False),
        "add_prefix_space": puts_space,  # transformers does not read it from the model
        "legacy": True,  # llama.cpp puts a space in front of text after every special token
        "chat_template": header.get("tokenizer.chat_template"),
        **{f"{role}_token": name for role, name in _special_tokens(header).items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_merges(header: GgufHeader, folder: Path) -> None:
    import transformers  # noqa: PLC0415 - takes seconds, which other formats should not cost

    pre = header.get("tokenizer.ggml.pre")
    if pre not in list(_SPLITTERS):
        raise ValueError(
            f"{header.path} has the pre-tokenizer {pre!r}, supported: {sorted(_SPLITTERS)}; "
            f"{_INSTEAD}"
        )
    splitter = _SPLITTERS[pre]
    tokens = _list(header, "tokens", str)
    types = [_NORMAL] * len(tokens)
    if header.get("tokenizer.ggml.token_type") is not None:
        types = _list(header, "token_type", int, len(tokens))
    kinds = dict(zip(tokens, types, strict=True))
    ids = {token: index for index, token in enumerate(tokens) if kinds[token] != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in _list(header, "merges", str)]
    odd = [m for m in merges if len(m) != 2 or not ids.keys() >= {*m, "".join(m)}]
    if odd:
        raise ValueError(
            f"{header.path}: tokenizer.ggml.merges has {' '.join(odd[0])!r}; a merge must be "
            "two tokens, with a space between them, that make a third"
        )
    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=splitter == "llama3"))
    if splitter == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitter)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in {
        _CONTROL: tokenizer.add_special_tokens,
        _USER_DEFINED: tokenizer.add_tokens,
    }.items():
        added = [token for token in ids if kinds[token] == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in added])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=header.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        add_bos_token=_flag(header, "add_bos_token", splitter == "llama3"),
        add_eos_token=_flag(header, "add_eos_token", False),
        **{f"{role}_token": name for role, name in _special_tokens(header).items()},
    ).save_pretrained(folder)


def _pre_tokenizer(splitter: str) -> Any:
    """The pre-tokenizer of a splitter, as in the tokenizer.json of its models."""
    if splitter == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splitter == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = _SPLIT.format(digits={"llama3": "{1,3}", "qwen2": ""}[splitter])
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, to_bytes])


def _special_tokens(header: GgufHeader) -> dict[str, str]:
    tokens = _list(header, "tokens", str)
    ids = {role: token_id(header, name) for role, name in _ROLES.items()}
    return {role: tokens[index] for role, index in ids.items() if index is not None}


def token_id(header: GgufHeader, name: str) -> int | None:
    """Id of a special token such as `eos`, None if not set; ValueError if it is out of range."""
    key = f"tokenizer.ggml.{name}_token_id"
    index = header.get(key)
    if index is None:
        return None
    num_tokens = len(_list(header, "tokens", str))
    if type(index) is not int or not 0 <= index < num_tokens:
        raise ValueError(f"{header.path}: {key} is {index!r}; it must be 0 to {num_tokens - 1}")
    return index


def _list(header: GgufHeader, key: str, kind: type, length: int | None = None) -> list[Any]:
    name = f"tokenizer.ggml.{key}"
    values = header.get(name)
    if type(values) is not list or any(type(value) is not kind for value in values):
        raise ValueError(
            f"{header.path}: {name} is {values!s:.80}; it must be an array of {kind.__name__}"
        )
    if length not in (None, len(values)):
        raise ValueError(f"{header.path}: {name} has {len(values):,} values, for {length:,} tokens")
    return values


def _flag(header: GgufHeader, key: str, default: bool) -> bool:
    name = f"tokenizer.ggml.{key}"
    return boolean(header.path, {name: header.get(name, default)}, name)
