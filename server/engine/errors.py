"""What can go wrong with a request in the engine."""


class EngineError(Exception):
    """Base of the errors a request can end with."""


class QueueFullError(EngineError):
    """As many requests as allowed are in the server."""


class RequestTooLargeError(EngineError):
    """The request could never fit the KV cache."""


class NonFiniteLogitsError(EngineError):
    """The model gave NaN or infinite logits for this request; it ends alone."""


class DrainingError(EngineError):
    """The server is shutting down."""


class EngineDeadError(EngineError):
    """A step failed; the server can't go on."""
