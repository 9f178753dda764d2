"""The rules in which MTP layers of different models differ, and the check of the option `wiring`.

This module imports no torch, because `mtpc.config` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

from mtpc.errors import OptionError

Rules: TypeAlias = "tuple[tuple[str, str | bool], ...]"
"""Values of rules by their names, in the order of names."""


@dataclass(frozen=True, kw_only=True)
class WiringRules:
    """What an MTP layer is fed and what reads its output: the rules of one family.

    docs/models.md has the values of each family, with the evidence for them, and what other
    implementations do. The option `wiring` of `mtpc.compile` changes them, and `mtpc check`
    measures them on a checkpoint.

    Attributes:
        hidden_first: order of the concatenation; False is [embedding, hidden].
        zero_first_embedding: whether the embedding at sequence position 0 is set to zero.
        first_features: whether the first draft is fed the target's hidden state "before" or
            "after" the target's final norm.
        next_features: whether the next draft is fed the MTP layer's hidden state "before" or
            "after" the layer's final norm.
        head: "own": the layer's own output head, if it stores one that differs from the target's;
            "target": the target's in any case.
        embedding: the same for the token embedding.
        chaining: how several MTP layers make several drafts. "layers": draft i comes from layer i,
            which is fed what layer i - 1 gave in each row. "target": draft i comes from layer i,
            which is fed the target's features. "recycle": all drafts come from layer 0. Drafts
            beyond the last layer always come from that layer, which is fed its own output.
    """

    hidden_first: bool = False
    zero_first_embedding: bool = False
    first_features: Literal["before", "after"] = "after"
    next_features: Literal["before", "after"] = "after"
    head: Literal["own", "target"] = "own"
    embedding: Literal["own", "target"] = "own"
    chaining: Literal["layers", "target", "recycle"] = "layers"


def choices() -> dict[str, tuple[str | bool, ...]]:
    """Rule -> the values that it can have."""
    hints = get_type_hints(WiringRules)
    return {f.name: get_args(hints[f.name]) or (False, True) for f in fields(WiringRules)}


def rule_text(rules: Rules) -> str:
    """Rules as the command line's option --wiring takes them."""
    return ",".join(f"{name}={str(value).lower()}" for name, value in rules)


def check_rules(given: Any) -> Rules:
    """The option `wiring` of `mtpc.compile`: a mapping of rules to values, or pairs of them.

    Raises:
        OptionError: a rule or a value is unknown.
    """
    try:
        rules = dict(given.items() if isinstance(given, Mapping) else given)
    except (TypeError, ValueError):
        raise OptionError(
            f"wiring is {given!r}; expected rules by name, as {{'first_features': 'before'}}"
        ) from None
    known = choices()
    for name, value in rules.items():
        if name not in known:
            raise OptionError(f"wiring has no rule {name!r}; expected one of {', '.join(known)}")
        if not any(type(value) is type(choice) and value == choice for choice in known[name]):
            values = ", ".join(map(repr, known[name]))
            raise OptionError(f"wiring has {name}={value!r}; expected one of {values}")
    return tuple(sorted(rules.items()))
