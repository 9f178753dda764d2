"""mtpc: compiler-style graph capture for Multi-Token-Prediction speculative decoding.

import mtpc
spec = mtpc.compile("path/to/checkpoint", spec_tokens=3)
print(spec.generate("Once upon a time", max_new_tokens=64))
print(spec.stats)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mtpc.api import SpecModel, compile
    from mtpc.config import CompileOptions
    from mtpc.engine.async_engine import AsyncEngine
    from mtpc.engine.completion import Completion, TokenCompletion
    from mtpc.engine.engine import Engine
    from mtpc.engine.grammar import Grammar
    from mtpc.engine.stats import Stats
    from mtpc.host.compile import compile_host
    from mtpc.host.hosted import HostedModel
    from mtpc.host.program import HostProgram
    from mtpc.integrations import transformers
    from mtpc.layout.progress import Progress
    from mtpc.sampling_params import SamplingParams
    from mtpc.weights.hub import demo

# Public names are loaded on first use: `import mtpc` must not import torch.
_HOMES = {
    "compile": "mtpc.api",
    "demo": "mtpc.weights.hub",
    "SpecModel": "mtpc.api",
    "CompileOptions": "mtpc.config",
    "Engine": "mtpc.engine.engine",
    "AsyncEngine": "mtpc.engine.async_engine",
    "Completion": "mtpc.engine.completion",
    "TokenCompletion": "mtpc.engine.completion",
    "Grammar": "mtpc.engine.grammar",
    "compile_host": "mtpc.host.compile",
    "HostedModel": "mtpc.host.hosted",
    "HostProgram": "mtpc.host.program",
    "Progress": "mtpc.layout.progress",
    "SamplingParams": "mtpc.sampling_params",
    "Stats": "mtpc.engine.stats",
}
_TRANSFORMERS = "mtpc.integrations.transformers"

__all__ = [
    "AsyncEngine",
    "CompileOptions",
    "Completion",
    "Engine",
    "Grammar",
    "HostProgram",
    "HostedModel",
    "Progress",
    "SamplingParams",
    "SpecModel",
    "Stats",
    "TokenCompletion",
    "__version__",
    "compile",
    "compile_host",
    "demo",
    "transformers",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return import_module(_TRANSFORMERS)
    if name not in _HOMES:
        raise AttributeError(f"module 'mtpc' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
