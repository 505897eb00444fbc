"""The one way to load a tokenizer; its ids equal those of its source file."""

import io
import json
import shutil

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.tiny import CORPUS, TEXTS, train

# tokenizer_config.json of Llama 2 and Mistral.
LLAMA2 = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": False},
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": None,
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[INST] {{ message['content'] }} [/INST]"
    "{% endfor %}"
)


def trained(folder, kind, **options):
    return train(folder, kind, **options).rename(folder / "tokenizer.model")


@pytest.fixture(scope="module", params=["bpe", "unigram", "unigram of Unicode forms"])
def model(request, tmp_path_factory):
    kind, _, is_normalized = request.param.partition(" of ")
    as_usual = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    options = as_usual if is_normalized else {}
    return trained(tmp_path_factory.mktemp("spm"), kind, **options)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("bpe"), "bpe")


def folder_of(model, folder, *, config=None):
    folder.mkdir()
    shutil.copyfile(model, folder / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def both(model, folder=None, **config):
    """Our tokenizer of a SentencePiece model with this tokenizer_config.json, and the original."""
    if folder is not None:
        folder = folder_of(model, folder, config=LLAMA2 | config)
    return load_tokenizer(folder or model.parent), SentencePieceProcessor(model_file=str(model))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("config", [None, LLAMA2])
def test_load_tokenizer_has_the_ids_of_sentencepiece(model, config, tmp_path):
    folder = folder_of(model, tmp_path / "model", config=config)
    tokenizer, original = load_tokenizer(folder), SentencePieceProcessor(model_file=str(model))
    for text in TEXTS:
        assert ids(tokenizer, text) == original.encode(text), text
        assert tokenizer.decode(original.encode(text)) == original.decode(original.encode(text))
    assert tokenizer(TEXTS, add_special_tokens=False)["input_ids"] == original.encode(TEXTS)
    special = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (0, 1, 2)
    assert tokenizer.pad_token_id is None
    assert len(tokenizer) == original.get_piece_size()


def test_load_tokenizer_round_trips_every_text(bpe):
    tokenizer = load_tokenizer(bpe.parent)
    for text in [*TEXTS, "<s>[INST] hi [/INST] a</s><s>b", "<s> <s>  x"]:
        assert tokenizer.decode(ids(tokenizer, text)) == text
    assert tokenizer.decode(ids(tokenizer, "<s>a</s>"), skip_special_tokens=True) == "a"


def test_load_tokenizer_cuts_at_special_tokens(bpe):
    tokenizer, original = both(bpe)
    wanted = [1, *original.encode("x y"), 2, 1, *original.encode("z")]
    assert ids(tokenizer, "<s>x y</s><s>z") == wanted


def test_load_tokenizer_knows_control_pieces(tmp_path):
    model = trained(tmp_path, "bpe", control_symbols=["[INST]", "[/INST]"])
    tokenizer, original = both(model)
    begin, end = (original.piece_to_id(piece) for piece in ("[INST]", "[/INST]"))
    assert ids(tokenizer, "[INST]x[/INST]") == [begin, *original.encode("x"), end]
    assert tokenizer.decode([begin, *original.encode("x"), end], skip_special_tokens=True) == "x"


def test_load_tokenizer_without_legacy_spaces(bpe, tmp_path):
    tokenizer, original = both(bpe, tmp_path / "model", legacy=False)
    for text in TEXTS:
        assert ids(tokenizer, text) == original.encode(text), text
    for text in ("<s>x y</s> z", "x<s>y"):
        tokens = tokenizer.convert_ids_to_tokens(ids(tokenizer, text))
        spaces = "".join(tokens).count("\u2581")
        assert spaces == text.count(" ") + (not text.startswith("<s>")), tokens
        assert tokenizer.decode(ids(tokenizer, text)) == text


def test_load_tokenizer_adds_begin_and_end_by_its_config(bpe, tmp_path):
    for number, (bos, eos) in enumerate([(True, True), (False, True), (False, False)]):
        config = {"add_bos_token": bos, "add_eos_token": eos}
        tokenizer, original = both(bpe, tmp_path / str(number), **config)
        assert tokenizer("a")["input_ids"] == [1] * bos + original.encode("a") + [2] * eos


def test_load_tokenizer_appends_tokens_of_the_config(bpe, tmp_path):
    config = {"pad_token": "<pad>", "additional_special_tokens": ["<|tool|>"]}
    tokenizer, _ = both(bpe, tmp_path / "model", **config)
    added = {tokenizer.pad_token_id, *ids(tokenizer, "<|tool|>")}
    assert added == {700, 701}
    assert tokenizer.decode(ids(tokenizer, "a<|tool|>b")) == "a<|tool|>b"


def test_load_tokenizer_of_a_saved_tokenizer(bpe, tmp_path):
    config = {"pad_token": "<pad>", "chat_template": CHAT_TEMPLATE, "legacy": False}
    tokenizer, _ = both(bpe, tmp_path / "model", **config)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.chat_template == CHAT_TEMPLATE
    assert again.pad_token_id == tokenizer.pad_token_id
    for text in [*TEXTS, "<s>x</s> <pad>"]:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def llama2_json(folder):
    """A tokenizer.json like Llama 2's, which puts a space in front of every stretch of text."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    special = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(
        vocab_size=700, special_tokens=[*special, *byte_pieces], show_progress=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA2 | {"legacy": False}))
    return tokenizer


def test_load_tokenizer_takes_tokenizer_json_first(bpe, tmp_path):
    original = llama2_json(tmp_path / "model")
    shutil.copyfile(bpe, tmp_path / "model" / "tokenizer.model")  # comes after it
    tokenizer = load_tokenizer(tmp_path / "model")
    for text in [*TEXTS, "<s>[INST] hi [/INST] a</s><s>b"]:
        assert tokenizer(text)["input_ids"] == original.encode(text).ids, text
        assert ids(tokenizer, text) == original.encode(text, add_special_tokens=False).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)


def vocabulary_and_merges(folder):
    """Write vocab.json and merges.txt, the files that Qwen2 was published with."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir()
    tokenizer.model.save(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return tokenizer


def test_load_tokenizer_of_vocabulary_and_merges(tmp_path):
    tokenizer = vocabulary_and_merges(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model")
    assert ids(loaded, "hello world") == tokenizer.encode("hello world").ids


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_load_tokenizer_runs_no_code(file, bpe, tmp_path, monkeypatch):
    folder, canary = tmp_path / "model", tmp_path / "canary"
    if file == "tokenizer.json":
        llama2_json(folder)
    elif file == "tokenizer.model":
        folder_of(bpe, folder)
    else:
        vocabulary_and_merges(folder)
    (folder / "evil.py").write_text(
        f"open({str(canary)!r}, 'w')\n"
        "from transformers import PretrainedConfig as Config\n"
        "from transformers import Qwen2Tokenizer as Evil\n"
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}})
    )
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config = {"tokenizer_class": "Evil", "auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))  # answers a prompt for trust
    if file == "vocab.json":
        with pytest.raises(ValueError, match=f"^{folder / file} cannot be loaded as a tokenizer: "):
            load_tokenizer(folder)
    else:
        assert ids(load_tokenizer(folder), "hello")
    assert not canary.exists()


def test_load_tokenizer_refuses_a_folder_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer: none of tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"IQ== 0\nIg== 1\n"])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_load_tokenizer_names_a_broken_file(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{file} cannot be loaded as a tokenizer: "):
        load_tokenizer(tmp_path)
