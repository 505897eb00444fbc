"""A tiny model that is trained to call a calculator: the tool, the reward, the data and the model.

    python -m demo.calculator models/tiny_calculator data/products.jsonl
    megatron-grpo train configs/learn_tool.yaml

Prompts ask for products of four digits, which a model of two layers cannot compute, and only the
right product is rewarded: the model must learn to call the tool with the right numbers. A random
model would never write a call, so supervised learning warms it up for about a minute. It sees the
form of calls, a quarter of them with wrong numbers, and then more and more guessed answers, up to
nine of ten.
"""

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

NUMBERS = range(32, 100)
"""All products have four digits."""
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<start>")
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>"
"""Text before, between and after the numbers of a call; each is one token."""
CHARACTERS = "\n*0123456789aeilmnoprstuy"
TEMPLATE = (
    "{% if tools %}<start>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "<eos>\n{% endif %}{% for message in messages %}<start>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
    "{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
ANSWER = "<start>assistant\n"
"""Text of the template before a turn of the model."""
SHARE_OF_CALLS, SHARE_OF_RIGHT_CALLS = 0.1, 0.75
"""Share of calls in the warm-up's last conversations; the first ones are all calls."""
IGNORED = -100
"""transformers' label of a token without a loss."""
NUM_STEPS, BATCH_SIZE, LR = 600, 32, 3e-3


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def right_product(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """1 when the model's last turn is the product, and nothing else."""
    return [
        float(text.rpartition(ANSWER)[2] == str(product))
        for text, product in zip(completions, answer, strict=True)
    ]


def write_data(out: Path) -> None:
    """Write one row for each pair of numbers; a run of minutes sees no pair twice."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}*{b}", "answer": a * b} for a in NUMBERS for b in NUMBERS]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path) -> None:
    """Save a two-layer Qwen3 after its warm-up, and its tokenizer."""
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    warm_up(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> "PreTrainedTokenizerBase":
    """A token for each character, and for each part of a call."""
    # Imported here, since rewards and tools import this file and need none of these.
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    names = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(names, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in CALL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<start>"],
        chat_template=TEMPLATE,
    )


def make_model(vocab_size: int) -> "Qwen3ForCausalLM":
    """A random model of two layers."""
    import torch  # noqa: PLC0415
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
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
    return Qwen3ForCausalLM(config).to(torch.float32)


def conversation(order: random.Random, share_of_calls: float) -> list[dict[str, Any]]:
    """A conversation of the warm-up: a guess, or a call and its result."""
    a, b = order.choices(NUMBERS, k=2)
    question = {"role": "user", "content": f"{a}*{b}"}
    if order.random() > share_of_calls:
        return [question, {"role": "assistant", "content": str(order.randrange(1000, 10000))}]
    if order.random() > SHARE_OF_RIGHT_CALLS:
        a, b = order.choices(NUMBERS, k=2)
    function = {"name": "multiply", "arguments": {"a": a, "b": b}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def warm_up(model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Train on the model's turns of conversations."""
    import torch  # noqa: PLC0415
    from torch.nn.utils.rnn import pad_sequence  # noqa: PLC0415

    order, tools = random.Random(0), [{"function": {"name": "multiply"}}]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    for step in range(NUM_STEPS):
        share = max(SHARE_OF_CALLS, 1.0 - step / (0.8 * NUM_STEPS))
        encoded = []
        for _ in range(BATCH_SIZE):
            chat = conversation(order, share)
            text = str(tokenizer.apply_chat_template(chat, tools=tools, tokenize=False))
            encoded.append(tokens_and_labels(text, tokenizer))
        tokens, labels = (
            pad_sequence([torch.tensor(row) for row in rows], True, padding)
            for rows, padding in zip(zip(*encoded, strict=True), (0, IGNORED), strict=True)
        )
        loss = model(tokens, labels=labels).loss  # padding after a row's end has no effect
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"warm-up, step {step + 1} of {NUM_STEPS}: loss {loss.item():.3f}", flush=True)


def tokens_and_labels(
    text: str, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, and their labels: `IGNORED` outside of the model's turns."""
    tokens: list[int] = []
    labels: list[int] = []
    first, *rest = text.split(ANSWER)
    parts = [(first, False)]
    for part in rest:
        turn, end, others = part.partition("<eos>")
        parts += [(ANSWER, False), (turn + end, True), (others, False)]
    for part, is_own in parts:
        ids = tokenizer(part)["input_ids"]
        tokens += ids
        labels += ids if is_own else [IGNORED] * len(ids)
    return tokens, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("data", type=Path, help="file of the data")
    arguments = parser.parse_args()
    write_model(arguments.model)
    write_data(arguments.data)


if __name__ == "__main__":
    main()
