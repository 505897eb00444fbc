"""Environments of the demos; a config names them as `demo/environments.py:GuessTheNumber`."""

import re

NUMBER = re.compile(r"-?\d+")


class GuessTheNumber:
    """Says higher or lower until the model has found the answer of the row."""

    def __init__(self, reward_of_a_number: float = 0.0) -> None:
        self.reward_of_a_number = reward_of_a_number

    def reset(self, prompt: str, answer: str | int) -> None:
        """Remember what is looked for; there is nothing to say yet."""
        self.number = int(answer)

    def step(self, text: str) -> tuple[str, float, bool]:
        """The last number in the text is the guess."""
        guesses = NUMBER.findall(text)
        if not guesses:
            return "Say a number.", 0.0, False
        guess = int(guesses[-1])
        if guess == self.number:
            return "Right.", 1.0, True
        hint = "Higher." if guess < self.number else "Lower."
        return hint, self.reward_of_a_number, False
