"""The error tree. Every message says what was found, what was expected and what to do."""


class MtpcError(Exception):
    """Base of all errors that mtpc raises on purpose."""


class OptionError(MtpcError, ValueError):
    """An option is unknown, of the wrong type or outside its range."""


class UnsupportedModelError(MtpcError):
    """The model's architecture, or a feature of its config, is not in the family table."""


class CheckpointError(MtpcError):
    """A checkpoint is missing, truncated, incomplete, or holds non-finite weights."""


class RequestError(MtpcError, ValueError):
    """A generation request cannot be served: empty prompt, ids out of range, too long."""


class GrammarError(MtpcError):
    """A request's grammar contradicts itself, or allows no token; it ends that request."""


class CapacityError(MtpcError):
    """The page pool cannot hold even one request of the size asked for."""


class ServingError(MtpcError):
    """An engine that served requests has failed, was closed, or does not run."""


class GraphError(MtpcError):
    """A StepGraph broke a rule of the verifier; the message names the pass, node and rule."""


class CaptureError(MtpcError):
    """A step cannot be captured, or a replay would not repeat what was captured."""


class BackendError(MtpcError):
    """A backend is unknown, cannot run on this machine, or failed to lower a graph."""


class HostError(MtpcError, ValueError):
    """What a host hands over, or the order of its calls, is not what the contract says."""


class NumericsError(MtpcError):
    """The model produced non-finite logits while decoding."""


class CacheError(MtpcError):
    """The graph cache cannot be used: unsafe permissions, damaged, or frozen without a match."""


class DamagedEntryError(CacheError):
    """Files of a cache entry are not what was written; the message names them."""


class CacheWriteError(CacheError):
    """The graph cache cannot be written: read-only, full, or without locks."""
