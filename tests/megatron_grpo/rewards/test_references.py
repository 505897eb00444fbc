"""Reference answers that a reward cannot read are reported before the start."""

import pytest

from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.rewards.by_source import reference_fault
from megatron_grpo.rewards.math import can_read, math_answer

UNREADABLE = ["", "####", " \n", "$", "$$", "By induction\nit is so"]
READABLE = [
    "even",
    "xy + yz",
    "\\$18.90",
    "costs $18",
    "It is\n18",
    "thus \\boxed{x}",
    7,
    "$x$ or\n$y$",
]


def fault(answer: object, *functions: object) -> str | None:
    found = reference_fault(RewardConfig(functions=list(functions)))({"answer": answer})
    return found and str(found)


@pytest.mark.parametrize("answer", UNREADABLE)
def test_an_answer_that_is_no_mathematics_is_a_fault_of_its_row(answer):
    with pytest.raises(ValueError, match="no mathematical answer"):
        math_answer(["1"], [answer], ["stop"])
    told = f"no answer that math_answer can read: {answer!r}"
    assert fault(answer, "exact", "math_answer") == told
    cosine = {"name": "cosine", "arguments": {"cosine_max_len": 9}}
    assert fault(answer, cosine) == told.replace("math_answer", "cosine")


@pytest.mark.parametrize("answer", READABLE)
def test_what_the_reward_reads_is_no_fault(answer):
    assert can_read(answer)
    math_answer(["1"], [answer], ["stop"])


def test_functions_that_read_no_mathematics_take_any_answer():
    by_text = {"name": "cosine", "arguments": {"cosine_max_len": 9, "accuracy": "exact"}}
    assert fault("####", "exact", by_text) is None
    assert reference_fault(RewardConfig(functions=["math_answer"]))({"prompt": "no answer"}) is None
