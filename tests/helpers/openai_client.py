"""A running server, OpenAI's own client, and requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

import mtpc
from helpers.served import is_idle, serving, until
from mtpc.server.run import Running

NAME = "tiny"
CHAT = [{"role": "user", "content": "w7 w8"}]
CHAT_IDS = [5, 11, 7, 8, 91]
"""The same by the template of helpers/word_model.py: bos, a number, the content, the next role."""


@pytest.fixture(scope="module")
def spec(word_spec: mtpc.SpecModel) -> mtpc.SpecModel:
    return word_spec


@pytest.fixture(scope="module")
def server(spec: mtpc.SpecModel) -> Iterator[Running]:
    with serving(spec, model_name=NAME) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(server: Running, spec: mtpc.SpecModel) -> Iterator[None]:
    yield
    until(lambda: is_idle(server, spec))


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    return client.completions.create(model=NAME, prompt=prompt, **fields)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 12, "messages": CHAT, **fields}
    return client.chat.completions.create(model=NAME, **fields)


def offline(spec: mtpc.SpecModel, ids: list[int], new: int = 12, **params: Any) -> list[int]:
    return spec.generate(ids, new, **params)
