"""The failure of a rollout engine."""


class EngineError(ConnectionError):
    """An engine died, refused a request, or answered what was not asked for; the text names it."""
