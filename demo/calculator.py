"""A tiny model that is trained to call a calculator: the model, its data, the tool and the reward.

    python -m demo.calculator models/tiny_calculator data/additions.jsonl
    megatron-grpo train configs/learn_tool.yaml

The model is random, and a call is a single token of its small vocabulary: with single characters it
would hardly ever write one by chance.
"""

import argparse
import json
import re
from pathlib import Path

NUMBERS = range(1, 4)
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<start>")
CHARACTERS = "\n+0123456789adeilmnorstuy"
TEMPLATE = (
    "{% if tools %}<start>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "<eos>\n{% endif %}{% for message in messages %}<start>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
    "{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def call_of(a: int, b: int) -> str:
    """What the model writes to have two numbers added."""
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def called_and_answered(
    completions: list[str], a: list[int], b: list[int], **_: object
) -> list[float]:
    """A quarter each for both numbers of the call, for the sum after it, and for nothing else."""
    rewards = []
    for text, x, y in zip(completions, a, b, strict=True):
        call = re.match(re.escape(call_of(0, 0)).replace("0", r"(\d)"), text)
        given = tuple(map(int, call.groups())) if call else (0, 0)
        _, _, last = text.rpartition("<start>assistant\n")
        rights = given[0] == x, given[1] == y, last.startswith(f"{x + y}"), last == f"{x + y}"
        rewards.append(sum(rights) / 4)
    return rewards


def write_data(out: Path) -> None:
    """Write one row for each pair of numbers."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}+{b}", "a": a, "b": b} for a in NUMBERS for b in NUMBERS]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path) -> None:
    """Save a random two-layer Qwen3 and its tokenizer."""
    # Rewards and tools import this file, too, and need none of these.
    import torch  # noqa: PLC0415
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    names = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(names, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    calls = [AddedToken(call_of(a, b), normalized=False) for a in NUMBERS for b in NUMBERS]
    tokenizer.add_tokens(calls)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<start>"],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(names) + len(calls),
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM serves on a CPU
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("data", type=Path, help="file of the data")
    arguments = parser.parse_args()
    write_model(arguments.model)
    write_data(arguments.data)


if __name__ == "__main__":
    main()
