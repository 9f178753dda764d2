"""The page about the server at / and /docs: one HTML text, which loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from mtpc.server.fields import NO_OPS, ONE_VALUE, REQUIRED, USED

_STYLE = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
_STYLE += "pre{background:#8882;padding:1rem;overflow:auto}td{padding-right:1rem}"


def docs_page(model: str, version: str, paths: Sequence[tuple[str, str, str]]) -> str:
    """The page as HTML, with method, path and description of each path."""
    rows = "".join(
        f"<tr><td><code>{method} {escape(path)}</code></td><td>{escape(text)}</td></tr>"
        for method, path, text in paths
    )
    tables = "".join(
        f"<h3>{endpoint}</h3><p>Used: {_names(USED[endpoint])}.</p>"
        f"<p>Without effect: {_names(NO_OPS.get(endpoint, ())) or 'none'}.</p>"
        f"<p>Only with their neutral value: {_names(ONE_VALUE.get(endpoint, ())) or 'none'}.</p>"
        for endpoint in REQUIRED
    )
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    example = (
        "curl $URL/v1/chat/completions -H 'content-type: application/json' -d @- <<'JSON'\n"
        f"{json.dumps(asked)}\nJSON"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>mtpc serve</title>"
        f"<style>{_STYLE}</style><h1>mtpc serves {escape(model)}</h1>"
        f"<p>mtpc {escape(version)} answers OpenAI's API. $URL is this page's address.</p>"
        f"<pre>{escape(example)}</pre><h2>Paths</h2><table>{rows}</table>"
        f"<h2>Fields</h2><p>As OpenAI and vLLM define them.</p>{tables}</html>"
    )


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"<code>{escape(name)}</code>" for name in fields)
