"""Plans of options, for tests that build steps themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtpc.backends import backend_facts
from mtpc.config import CompileOptions
from mtpc.plan import Plan, make_plan


def plan_of(**options: Any) -> Plan:
    """The plan of options alone."""
    return make_plan(CompileOptions(**options))


def changed(plan: Plan, **options: Any) -> Plan:
    """The plan of the same facts and other options."""
    return make_plan(replace(plan.asked, **options), plan.facts)


def of_backend(backend: str = "auto", stored: str = "", **options: Any) -> Plan:
    """The plan for a backend, and for a model whose weights are stored in a dtype."""
    facts = replace(backend_facts(backend), dtype=stored)
    return make_plan(CompileOptions(backend=backend, **options), facts)
