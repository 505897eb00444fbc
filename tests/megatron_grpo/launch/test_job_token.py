"""The token of a job: where it comes from, and which ones are refused."""

import pytest

from megatron_grpo.launch.run_dir import check_token, new_token, take_token

GOOD = "0123456789abcdef"


def test_every_start_makes_another_token_of_256_bits():
    tokens = {new_token() for _ in range(8)}
    assert len(tokens) == 8
    assert all(check_token(token) == token and len(token) == 64 for token in tokens)


def test_what_is_taken_is_not_inherited():
    environ = {"MEGATRON_GRPO_TOKEN": GOOD, "PATH": "/bin"}
    assert take_token(environ) == GOOD
    assert environ == {"PATH": "/bin"}
    assert take_token(environ) is None


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "is not set"),
        ("", "is not set"),
        (GOOD[1:], "has 15 characters, at least 16 are needed"),
        (GOOD + " ", "has spaces"),
        (GOOD + "\n", "has spaces"),
        (GOOD + "ä", "has spaces or other characters"),
    ],
)
def test_what_is_no_token_is_refused_and_not_shown(token, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_token(token)
    assert "export MEGATRON_GRPO_TOKEN=$(openssl rand -hex 32)" in str(refused.value)
    assert GOOD[1:] not in str(refused.value)
