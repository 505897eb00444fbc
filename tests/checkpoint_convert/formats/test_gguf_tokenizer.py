"""The tokenizer of a GGUF file gives the same ids as the tokenizer it was made from."""

import json

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from checkpoint_convert.formats.gguf_header import GgufHeader
from checkpoint_convert.formats.gguf_tokenizer import write_tokenizer
from checkpoint_convert.tokenizer import load_tokenizer
from gguf_models import write_gguf
from models import tiny_model
from sentencepiece_models import CORPUS, TEXTS, train

CONTROL = ["<|end|>", "<|start|>"]
USER_DEFINED = ["<tool>", "<a\u2581b>"]
WORD = " return"
# The regular expressions in the tokenizer.json of Llama 3 and Qwen 2, which differ in NUMBERS.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=700)


def byte_level(words):
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def digits_apart():
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": digits_apart(),
    "llama-bpe": byte_level(WORDS.replace("NUMBERS", "{1,3}")),
    "qwen2": byte_level(WORDS.replace("NUMBERS", "")),
}


def trained(pre):
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if pre == "llama-bpe":  # here a word that is a token needs no merges: drop WORD's last merge
        model = json.loads(tokenizer.to_str())["model"]
        merges = [
            tuple(merge)
            for merge in model["merges"]
            if "".join(merge) != WORD.replace(" ", "\u0120")
        ]
        assert len(merges) == len(model["merges"]) - 1
        tokenizer.model = BPE(model["vocab"], merges, ignore_merges=True)
    return tokenizer


def merges_metadata(tokenizer, pre):
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    padding = [f"[PAD{i}]" for i in range(len(tokens), 700)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2), *[5] * len(padding)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def tokenizer_of(metadata, model, tmp_path):
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    write_tokenizer(GgufHeader(gguf), tmp_path)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_a_tokenizer_with_merges_gives_the_same_ids(pre, model, tmp_path):
    original = trained(pre)
    tokenizer = tokenizer_of(merges_metadata(original, pre), model, tmp_path)
    texts = [*TEXTS, "e\u0301te\u0301", "1234567 890", WORD, "<|start|>user\nhi<|end|>\n"]
    for text in texts:
        wanted = original.encode(text, add_special_tokens=False).ids
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == wanted, text
        if pre != "qwen2":  # its normalizer composes accents
            assert tokenizer.decode(wanted) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer.decode([1, 0], skip_special_tokens=True) == ""
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    # Engines load the same folder like this.
    engine = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert engine(texts)["input_ids"] == tokenizer(texts)["input_ids"]


@pytest.mark.parametrize(
    ("pre", "said", "wanted"),
    [("llama-bpe", None, True), ("qwen2", None, False), ("gpt-2", True, True)],
)
def test_a_text_begins_with_the_token_that_the_model_knows(pre, said, wanted, model, tmp_path):
    metadata = merges_metadata(trained(pre), pre) | {"tokenizer.ggml.add_bos_token": said}
    tokenizer = tokenizer_of(metadata, model, tmp_path)
    assert (tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id) == wanted


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return train(tmp_path_factory.mktemp("spm"), "bpe", user_defined_symbols=USER_DEFINED)


def scores_metadata(model):
    kinds = []
    for index in range(model.get_piece_size()):
        piece = model.id_to_piece(index)
        is_kind = {
            2: model.is_unknown(index),
            3: model.is_control(index),
            4: piece in USER_DEFINED,
            6: model.is_byte(index),
        }
        kinds.append(next((kind for kind, is_it in is_kind.items() if is_it), 1))
    pieces = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            model.id_to_piece(index).replace("\u2581", " " if kind == 4 else "\u2581")
            for index, kind in zip(pieces, kinds, strict=True)
        ],
        "tokenizer.ggml.scores": [model.get_score(index) for index in pieces],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.ggml.add_space_prefix": True,
    }


def test_a_tokenizer_with_scores_becomes_its_sentencepiece_model(sentencepiece, model, tmp_path):
    original = SentencePieceProcessor(model_file=str(sentencepiece))
    tokenizer = tokenizer_of(scores_metadata(original), model, tmp_path)
    for text in [*TEXTS, "call <tool> <a b> now"]:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == original.encode(text)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (2, 0, None)


@pytest.mark.parametrize("puts_space", [True, False])
def test_engines_put_a_space_in_front_of_a_text_where_the_file_says_so(
    puts_space, sentencepiece, model, tmp_path
):
    metadata = scores_metadata(SentencePieceProcessor(model_file=str(sentencepiece)))
    metadata["tokenizer.ggml.add_space_prefix"] = puts_space
    tokenizer = tokenizer_of(metadata, model, tmp_path)
    engine = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    # transformers adds no space before a text that starts with one.
    texts = [text for text in TEXTS if not text.startswith(" ")] + ["hi</s>there"]
    assert engine(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    assert tokenizer.tokenize("hi")[0].startswith("\u2581") == puts_space


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "a tokenizer of kind 'rwkv'"),
        ({"tokenizer.ggml.pre": "tekken"}, "the pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.pre": None}, "the pre-tokenizer None"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, r"the pre-tokenizer \['gpt-2'\]"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused(change, said, model, tmp_path):
    metadata = merges_metadata(trained("gpt-2"), "gpt-2") | change
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    with pytest.raises(ValueError, match=said) as refused:
        write_tokenizer(GgufHeader(gguf), tmp_path)
    instead = (
        "put config.json and the tokenizer files of the original model in a folder, and give it"
    )
    assert str(refused.value).endswith(f"]; {instead} with --hf-config")


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("gpt2", "tokens", None, "is None; it must be an array of str"),
        ("gpt2", "tokens", [1, 2], "is [1, 2]; it must be an array of str"),
        ("gpt2", "token_type", [1, 1], "has 2 values, for 700 tokens"),
        ("gpt2", "merges", None, "is None; it must be an array of str"),
        ("gpt2", "merges", ["ab"], "has 'ab'; a merge must be two tokens"),
        (
            "gpt2",
            "merges",
            ["a \u00a1\u00a1"],
            "has 'a \u00a1\u00a1'; a merge must be two tokens",
        ),
        ("gpt2", "bos_token_id", 700, "is 700; it must be 0 to 699"),
        ("gpt2", "add_bos_token", "yes", "is 'yes'; it must be true or false"),
        ("llama", "scores", None, "is None; it must be an array of float"),
        ("llama", "token_type", None, "is None; it must be an array of int"),
        ("llama", "unknown_token_id", "<unk>", "is '<unk>'; it must be 0 to 699"),
        ("llama", "add_space_prefix", 1, "is 1; it must be true or false"),
    ],
)
def test_metadata_of_a_tokenizer_that_are_missing_or_cannot_be_are_named(
    kind, key, value, said, sentencepiece, model, tmp_path
):
    if kind == "gpt2":
        metadata = merges_metadata(trained("gpt-2"), "gpt-2")
    else:
        metadata = scores_metadata(SentencePieceProcessor(model_file=str(sentencepiece)))
    metadata[f"tokenizer.ggml.{key}"] = value
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    with pytest.raises(ValueError) as refused:
        write_tokenizer(GgufHeader(gguf), tmp_path)
    assert str(refused.value).startswith(f"{gguf}: tokenizer.ggml.{key} {said}")


def test_tokens_without_types_are_normal_ones(model, tmp_path):
    original = trained("gpt-2")
    metadata = merges_metadata(original, "gpt-2") | {"tokenizer.ggml.token_type": None}
    tokenizer = tokenizer_of(metadata, model, tmp_path)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == original.encode(text, add_special_tokens=False).ids
