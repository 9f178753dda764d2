"""How a field of `CompileOptions` or `ServerOptions` is declared: its help, its flag, its check.

Commands, keys of the graph cache and hosts read the declarations; none of them keeps a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

GROUPS = ("decoding", "batching", "memory", "sampling", "devices", "cache", "debugging")
"""The headings of the help of `CompileOptions`, in order."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a field says of itself.

    Attributes:
        group: its heading in the help of commands.
        check: takes its name and a value, and returns the value in its one form, or raises
            OptionError.
        help: one line for commands; "" if none has a flag.
        metavar: its value's name in the help, which also says how commands parse it; "" is a
            switch.
        flag: its name on the command line, where that is not the field's.
        vllm: vLLM's name of the flag; "" if it has none.
        shown: its default in the help; None is the text of the default, "" is none.
        common: whether `--help` shows it, and not `--help-all` alone.
        key: its text in the keys of the graph cache; None if no step depends on it, or only by
            sizes (`mtpc.program.step_cache`).
        for_hosts: whether `compile_host` takes it; if not, it is the engine's.
    """

    group: str
    check: Callable[[str, Any], Any]
    help: str = ""
    metavar: str = ""
    flag: str = ""
    vllm: str = ""
    shown: str | None = None
    common: bool = False
    key: Callable[[Any], str] | None = None
    for_hosts: bool = True

    def flags(self, name: str) -> tuple[str, ...]:
        """The names on the command line of the field of this name."""
        own = self.flag or f"--{name.replace('_', '-')}"
        return (own, self.vllm) if self.vllm else (own,)


def option(
    default: Any,
    group: str,
    check: Callable[[str, Any], Any],
    help: str = "",
    metavar: str = "",
    repr: bool = True,
    **more: Any,
) -> Any:
    """A field of a dataclass with its default and its declaration, of which `more` are the rest."""
    said = Declared(group=group, check=check, help=help, metavar=metavar, **more)
    return field(default=default, repr=repr, metadata={_NAME: said})


_NAME = "declared"


def declared(options: type) -> Iterator[tuple[str, Declared]]:
    """The fields of a class of options by name, each with its declaration."""
    for each in fields(options):
        yield each.name, each.metadata[_NAME]
