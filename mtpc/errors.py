"""mtpc's errors. Every message says what was found, what was expected and what to do."""


class MtpcError(Exception):
    """Base class of all errors that mtpc raises itself."""


class OptionError(MtpcError, ValueError):
    """An option is unknown, of the wrong type or outside its range."""


class UnsupportedModelError(MtpcError):
    """The model's architecture, or a feature of the model, is not supported."""


class CheckpointError(MtpcError):
    """A checkpoint is missing, truncated, incomplete, or holds non-finite weights."""


class RequestError(MtpcError, ValueError):
    """A request cannot be served: its prompt is empty or too long, or a value is out of range."""


class GrammarError(MtpcError):
    """A request's grammar contradicts itself or allows no token; this ends the request."""


class CapacityError(MtpcError):
    """The page pool is too small for one request of the given size."""


class ServingError(MtpcError):
    """The engine has failed, is closed, or is not running."""


class GraphError(MtpcError):
    """A StepGraph breaks a rule; the verifier's message names the pass, the rule and the node."""


class CaptureError(MtpcError):
    """A step cannot be captured, or a replay would not repeat the captured work."""


class BackendError(MtpcError):
    """A backend cannot run on this machine, or failed to compile a graph."""


class HostError(MtpcError, ValueError):
    """A host's tensors, or the order of its calls, break the contract with hosts."""


class RankError(MtpcError):
    """Another of the ranks that share a model has failed, has ended, or has other inputs."""


class LostRankError(RankError):
    """Another rank no longer answers: as a rule its process has ended."""


class NumericsError(MtpcError):
    """The model computed logits that are not finite."""


class CacheError(MtpcError):
    """The graph cache cannot be used: another user could write it, it is damaged, or it is frozen
    and lacks a step."""


class DamagedEntryError(CacheError):
    """Files of a cache entry were changed or removed; the message names them."""


class CacheWriteError(CacheError):
    """The graph cache cannot be written: it is read-only, it is full, or it cannot be locked."""
