"""The demo's conversion of a GGUF file: equal weights and shape, and a tokenizer like SmolLM's."""

import json
from dataclasses import replace

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from checkpoint_convert import read_shape
from demo.model import convert_gguf
from helpers.models.tiny import CORPUS, TEXTS, tiny_model

VOCAB_SIZE = 600
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    folder = tmp_path_factory.mktemp("model")
    return tiny_model(folder, "llama", tied=True, vocab_size=VOCAB_SIZE, **tokens)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of SmolLM's kind."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=CONTROL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


@pytest.fixture(scope="module")
def converted(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, json.loads((model / "config.json").read_text()))
    add_tokenizer(writer, tokenizer)
    add_weights(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert_gguf(path, folder / "out")
    return folder / "out"


def add_shape(writer, config):
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_tokenizer(writer, tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[token in CONTROL] for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def add_weights(writer, model):
    """Add the weights by llama.cpp's names, with its order of the rows of queries and keys."""
    shape = read_shape(model)
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_layers)
    for name, values in load_file(model / "model.safetensors").items():
        for part, num_heads in heads.items():
            if part in name:  # llama.cpp rotates neighbours, and Hugging Face the halves of a head
                halves = values.view(num_heads, 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values.numpy())


def test_converted_weights_and_shape_equal_the_models(model, converted):
    weights, expected = (load_file(at / "model.safetensors") for at in (converted, model))
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(weights[name], values.bfloat16()), name
    shape, wanted = read_shape(converted), read_shape(model)
    assert shape.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)  # stored in float32
    assert replace(shape, rms_norm_eps=wanted.rms_norm_eps) == wanted


def test_the_tokenizer_gives_the_same_ids(tokenizer, converted):
    loaded = AutoTokenizer.from_pretrained(converted, local_files_only=True)
    for text in [*TEXTS, "a  12 + 345", "<|im_start|>user\nhi<|im_end|>\n"]:
        wanted = tokenizer.encode(text, add_special_tokens=False).ids
        assert loaded(text)["input_ids"] == wanted, text
        assert loaded.decode(wanted) == text
    special = loaded.unk_token, loaded.bos_token, loaded.eos_token, loaded.pad_token
    assert special == (*CONTROL, CONTROL[2])
    assert loaded.chat_template == TEMPLATE
