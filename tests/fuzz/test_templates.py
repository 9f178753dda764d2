"""Random chat templates: a prompt, or one error, within a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.hostile import random_template, rendered


def test_random_templates(chances: Callable[..., Any]) -> None:
    found = {rendered(random_template(chance, size=12))[:60] for chance in chances()}
    assert len(found) > 4, "hardly anything was refused: nothing was tested"
