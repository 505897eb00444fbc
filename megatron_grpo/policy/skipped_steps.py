"""Counts optimizer steps in a row that were skipped because a value was not finite."""


class SkippedSteps:
    """The count and its limit, the same on every rank; checkpoints save only `num_in_a_row`."""

    def __init__(self, limit: int, num_in_a_row: int = 0) -> None:
        self.limit = limit
        self.num_in_a_row = num_in_a_row
        self._causes: list[str] = []

    def count(self, cause: str | None) -> None:
        """Count a step: `cause` says why it was skipped, None that it was taken.

        Raises FloatingPointError, with all causes, when `limit` steps in a row were skipped.
        """
        if cause is None:
            self.num_in_a_row = 0
            self._causes.clear()
            return
        self.num_in_a_row += 1
        self._causes.append(cause)
        if self.num_in_a_row >= self.limit:
            earlier = self.num_in_a_row - len(self._causes)
            before = [f"{earlier} before this run was resumed"] if earlier else []
            raise FloatingPointError(
                f"{self.num_in_a_row} optimizer steps in a row were skipped, and "
                f"train.max_skipped_steps is {self.limit}: " + "; ".join([*before, *self._causes])
            )
