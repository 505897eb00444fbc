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
    """Generations have ended for good, on all ranks, which save and stop.

    Mostly because no engine serves and none came back in time; but also when rewards or
    environments fail. The message says why.
    """
