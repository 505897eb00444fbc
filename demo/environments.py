"""Environments of the demos; a config names them as `demo/environments.py:GuessTheNumber`."""

import re

NUMBER = re.compile(r"-?\d+")


class GuessTheNumber:
    """Answers higher or lower until the model has guessed the answer of the row."""

    def __init__(self, reward_of_a_number: float = 0.0) -> None:
        self.reward_of_a_number = reward_of_a_number

    def reset(self, prompt: str, answer: str | int) -> None:
        """Remember the number to guess; no text is added to the prompt."""
        self.number = int(answer)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Take the last number in the text as the guess; returns observation, reward and done."""
        guesses = NUMBER.findall(text)
        if not guesses:
            return "Say a number.", 0.0, False
        guess = int(guesses[-1])
        if guess == self.number:
            return "Right.", 1.0, True
        hint = "Higher." if guess < self.number else "Lower."
        return hint, self.reward_of_a_number, False
