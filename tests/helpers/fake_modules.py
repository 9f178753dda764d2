"""Packages that are not installed with the tests, as Python imports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def fake_modules(host: str, modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Modules of a package `host`, the parts of each by name, for imports of `mtpc.integrations.`
    `host`; both are forgotten at the end."""
    for name, parts in modules.items():
        for length in range(1, name.count(".") + 2):
            parent = ".".join(name.split(".")[:length])
            sys.modules.setdefault(parent, ModuleType(parent))
        vars(sys.modules[name]).update(parts)
    try:
        yield
    finally:
        for name in list(sys.modules):
            if name.split(".")[0] == host or name.startswith(f"mtpc.integrations.{host}."):
                del sys.modules[name]
