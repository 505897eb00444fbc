import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Sequence
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.runs.rewards import sample_of
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.token_log import VALUES
from megatron_grpo.config.data import DataConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Branch, Heard
from megatron_grpo.reporting.completions import completion_rows, token_rows, token_texts
from megatron_grpo.reporting.metrics import StepReport

ROW = {
    "question": "What is 7 + 5?",
    "answer": "12",
    "tests": "x" * 3000,
    "level": math.nan,
    "source\udce9": "cut in \ud83d",
}
REWARDS = [1.0, math.nan, 0.0]


@pytest.fixture
def tokenizer(tied_model: Path) -> Any:
    return load_tokenizer(tied_model)


def experience(**options: Any) -> Experience:
    """Three completions of one prompt: advantage = 2 * reward - 1."""
    prompt = Prompt(index=4, token_ids=(1, 2), text="What is 7 + 5?", row=ROW)
    tokens = {"completion_ids": (33, 34), "logprobs": (-0.5, -0.1), "policy_version": 6}
    samples = [
        sample_of("żółw 12", {}, 4, i, prompt, **tokens | options) for i in range(len(REWARDS))
    ]
    totals = torch.tensor(REWARDS, dtype=torch.float64)
    advantages = (2 * totals - 1).nan_to_num()
    scores = [{"exact": reward} for reward in REWARDS]
    return Experience(samples, scores, totals, torch.zeros(3), advantages)


def rows(tokenizer: Any, made: Experience) -> list[dict[str, Any]]:
    report = StepReport({}, [math.nan, 1.5, 2.5], [0.01] * 3, torch.zeros(0))
    return completion_rows(7, made, range(3), report, "question", tokenizer)


def test_completion_rows_have_null_for_what_is_unknown(tokenizer: Any) -> None:
    first, failed, last = rows(tokenizer, experience())
    assert first == {
        "step": 7,
        "prompt_index": 4,
        "sample_index": 0,
        "prompt": "What is 7 + 5?",
        "completion": "żółw 12",
        "num_tokens": 2,
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 1.0,
        "entropy": None,  # no token of it counts
        "logprob_gap": 0.01,
        "finish_reason": "stop",
        "policy_version": 6,
        # The prompt is as it was sent, and long values are cut.
        "columns": {
            "answer": "12",
            "tests": "x" * 2000 + "…",
            "level": None,
            "source?": "cut in ?",
        },
    }
    # `view` finds a row by its first keys, without decoding it.
    assert list(first)[:3] == ["step", "prompt_index", "sample_index"]
    assert (failed["sample_index"], failed["reward"]) == (1, None)
    assert failed["rewards"] == {"exact": None}
    assert (last["advantage"], last["entropy"]) == (-1.0, 2.5)


def test_completion_rows_have_the_messages_of_the_prompt_and_what_an_agent_told(
    tokenizer: Any,
) -> None:
    made = experience(metrics={"calls": 2.0}, failure="its stderr ends with\n\udce9")
    data = DataConfig(path="x", prompt_column="question", system_prompt="Be brief.")
    samples = [replace(s, prompt=replace(s.prompt, data=data)) for s in made.samples]
    row = rows(tokenizer, replace(made, samples=samples))[0]
    assert row["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 7 + 5?"},
    ]
    assert (row["metrics"], row["failure"]) == ({"calls": 2.0}, "its stderr ends with\n?")


def test_turns_of_a_dialogue_have_tokens_and_rewards(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    made = experience(
        completion_ids=(33, eos, 40, 41, 34, eos),
        logprobs=[0.0] * 6,
        loss_mask=(1, 1, 0, 0, 1, 1),
        step_rewards=((1, 0.25), (5, 1.0)),
        heard=(Heard((), ()), Heard(("environment",), (), ("warmer",))),
    )
    assert rows(tokenizer, made)[0]["turns"] == [
        {"role": role, "text": text, "reward": reward, "num_tokens": 2}
        for role, text, reward in (
            ("assistant", tokenizer.decode([33, eos]), 0.25),
            ("environment", "warmer", None),  # without the chat template
            ("assistant", tokenizer.decode([34, eos]), 1.0),
        )
    ]


def test_turns_of_an_agent_have_roles_calls_and_branches(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    made = experience(
        completion_ids=(33, eos, 40, 41, 34, eos, 50, 35, eos),
        logprobs=[0.0] * 9,
        loss_mask=(1, 1, 0, 0, 1, 1, 0, 1, 1),
        step_rewards=((1, 0.0), (5, 0.0), (8, 1.0)),
        heard=(
            Heard(("user",), ("add",), ("7 + 5?",)),
            Heard(("tool", "tool"), (), ("12", "13")),
            Heard(("user",), (), ("again",)),
        ),
        branches=(Branch(((0, 2),), 0, 6), Branch(((0, 2),), 6, 9)),
    )
    found = rows(tokenizer, made)[0]["turns"]
    assert [(turn["role"], turn["branch"], turn.get("calls")) for turn in found] == [
        ("assistant", 0, ("add",)),
        ("tool", 0, None),
        ("assistant", 0, None),
        ("user", 1, None),
        ("assistant", 1, None),
    ]
    assert [turn["num_tokens"] for turn in found] == [2, 2, 2, 1, 2]
    assert [turn["text"] for turn in found[1::2]] == ["12\n13", "again"]
    # A branch that shares no token has its own first token as its context.
    made = experience(
        completion_ids=(33, 34, 40, 41, 35),
        logprobs=[0.0] * 5,
        loss_mask=(1, 1, 0, 0, 1),
        step_rewards=((1, 0.0), (4, 1.0)),
        heard=(Heard(("user",), ()), Heard(("system", "user"), ())),
        branches=(Branch(((0, 2),), 0, 2), Branch(((4, 5),), 3, 5)),
    )
    found = rows(tokenizer, made)[0]["turns"]
    assert [(turn["role"], turn["branch"], turn["num_tokens"]) for turn in found] == [
        ("assistant", 0, 2),
        ("system, user", 1, 2),
        ("assistant", 1, 1),
    ]


def test_token_rows_have_values_as_far_as_they_are_logged(tokenizer: Any) -> None:
    values = torch.zeros(3, len(VALUES))
    columns = {"mask": [1.0, 1.0, 0.0], "logprob": [-0.25, -1.0, 0.0], "gap": [0.1, torch.nan, 0.0]}
    for name, column in columns.items():
        values[:, VALUES.index(name)] = torch.tensor(column)
    found = token_rows(7, experience(), [2, 0, 1], values, tokenizer)
    assert [(row["sample_index"], len(row["token_ids"])) for row in found] == [(2, 2), (0, 1)]
    first, second = found
    assert first["tokens"] == [tokenizer.decode([33]), tokenizer.decode([34])]
    assert (first["mask"], second["mask"]) == ([1, 1], [0])
    assert (first["logprob"], second["logprob"]) == ([-0.25, -1.0], [None])
    assert first["gap"] == [0.1, None]
    assert first["rollout_logprob"] == [-0.5, -0.1]
    assert (first["advantage"], second["advantage"]) == ([-1.0, -1.0], [1.0])
    # Each token has the version that sampled it.
    made = experience(versions=((5, 1), (6, 1)), policy_version=5)
    found = token_rows(7, made, [0, 1], values, tokenizer)
    assert [row["policy_version"] for row in found] == [[5, 6], [5]]
    whole = token_rows(7, experience(), [0, 1], values, tokenizer)
    assert [row["policy_version"] for row in whole] == [6, 6]


def test_token_texts_have_a_character_at_its_last_token() -> None:
    letters = sorted(ByteLevel.alphabet())
    of_bytes = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    of_bytes.pre_tokenizer = ByteLevel(add_prefix_space=False)
    of_bytes.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes)
    ids = tokenizer("1 🐢!")["input_ids"]
    assert token_texts(ids, tokenizer) == ["1", " ", "", "", "", "🐢", "!"]


def test_token_texts_go_on_behind_bytes_of_no_character() -> None:
    """A decoder with byte fallback may withdraw a character that it has returned."""
    pieces = ["a", *(f"<0x{byte:02X}>" for byte in range(256))]
    of_pieces = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    of_pieces.decoder = Sequence([ByteFallback(), Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_pieces)
    turtle = [1 + byte for byte in "🐢".encode()]
    texts = token_texts([*turtle, 1 + 0x80, 0], tokenizer)
    assert texts[3] == "🐢" and texts[-1].endswith("a")
