"""Exceptions for failures of rollout engines."""


class EngineError(ConnectionError):
    """An engine died, refused a request, or gave a wrong answer; the message names the engine."""


class EngineDown(EngineError):
    """An engine is dead, hangs or is broken: its unanswered requests must go to another one."""


class EngineStale(EngineError):
    """An engine is healthy but holds no complete weights: it needs a push before it can serve."""


class EnginesOut(EngineError):
    """No engine is serving now, but some may after the next push."""


class EnginesLost(EngineError):
    """No engine serves, and none came back in time; the message says how each ended."""
