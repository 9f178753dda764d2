"""`mtpc serve --draft DIR` as a process of its own, asked by OpenAI's client."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers.oracles import Oracle
from helpers.served import process, until
from helpers.theorem import PROMPTS
from helpers.tiny import apart
from helpers.word_model import word_checkpoint, words

CASES = [
    ("llama", "eager", "3"),
    pytest.param("mimo", "eager", "3", marks=pytest.mark.slow),
    pytest.param("llama", "cpu", "3", marks=pytest.mark.slow),
    pytest.param("llama", "cpu", "auto", marks=pytest.mark.slow),
    pytest.param("gemma4", "cpu", "auto", marks=pytest.mark.slow),
]
"""An EAGLE-3 head in the public format, and MTP layers of their own."""
READY = 'spec_decode_tiers_ready{spec_tokens="3"}'


def metrics(url: str) -> str:
    """All metrics of a server."""
    return httpx.get(url.replace("/v1", "/metrics")).text


def counted(url: str, name: str) -> float:
    """A metric's value."""
    text = metrics(url)
    found = re.search(rf"^mtpc:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend", "spec_tokens"), CASES)
def test_a_drafter_serves(
    family: str,
    backend: str,
    spec_tokens: str,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
    cpu_cache: Path,
    tmp_path: Path,
) -> None:
    """Text of plain decoding, whole and streamed; drafts are accepted in part; an orderly end.

    With "auto" the first prompts are answered while the steps with drafts are built.
    """
    source = checkpoint(family)
    target, draft = apart(source, tmp_path) if family == "mimo" else (source, source / "draft")
    target = word_checkpoint(target, tmp_path / "words")
    plain = oracle(family)
    options = ["--backend", backend, "--cache-dir", str(cpu_cache), "--draft", str(draft)]
    with process(target, *options, "--spec-tokens", spec_tokens) as (server, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        fields: dict[str, Any] = dict(model=target.name, temperature=0, max_tokens=16)
        fields["extra_body"] = {"ignore_eos": True}
        for rest in (PROMPTS[3:5], PROMPTS[3:9]):
            for prompt in rest:
                wanted = words(plain.generate(prompt, 16, stop=False))
                done = client.completions.create(prompt=prompt, **fields)
                assert done.choices[0].text == wanted
                with client.completions.create(prompt=prompt, stream=True, **fields) as stream:
                    assert "".join(chunk.choices[0].text for chunk in stream) == wanted
            until(lambda: READY in metrics(url), 120)
        accepted = counted(url, "spec_decode_num_accepted_tokens_total")
        assert 0 < accepted < counted(url, "spec_decode_num_draft_tokens_total")
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
