"""The failures of rollout engines."""


class EngineError(ConnectionError):
    """An engine died, refused a request, or answered what was not asked for; the text names it."""


class EngineDown(EngineError):
    """An engine is dead, hangs or is broken: what it has not answered another one must."""


class EngineStale(EngineError):
    """An engine is well and holds no complete weights: only a push makes it serve."""


class EnginesOut(EngineError):
    """No engine serves at present: some may after the next push."""


class EnginesLost(EngineError):
    """No engine serves, and none came back in time; the text says how each ended."""
