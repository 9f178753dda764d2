"""mtpc's paths as an ASGI application that another program listens for: plain uvicorn here."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn
from helpers.word_model import words

import mtpc
from mtpc.errors import OptionError
from mtpc.server.app import Gate
from mtpc.server.asgi import asgi_app
from mtpc.server.options import ServerOptions


@contextmanager
def listening(app: Gate) -> Iterator[tuple[openai.OpenAI, uvicorn.Server]]:
    """uvicorn in a thread, with nothing of mtpc's around the application."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="on", log_level="error"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),))
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x"), server
    finally:
        server.should_exit = True
        thread.join()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 9, "temperature": 0, **fields}
    return client.completions.create(**given)


def test_another_program_listens(word_spec: mtpc.SpecModel) -> None:
    """Whole and streamed answers are those of `generate`."""
    expected = words(word_spec.generate([7, 8, 9], 9))
    app = asgi_app(word_spec, ServerOptions(model_name="tiny"))
    with listening(app) as (client, _):
        assert ask(client).choices[0].text == expected
        parts = [part.choices[0].text for part in ask(client, stream=True) if part.choices]
        assert "".join(parts) == expected
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            ask(client, model="another")


def test_synthetic_acceptance_is_not_served(word_spec: mtpc.SpecModel) -> None:
    """Its text is not the model's."""
    spec = mtpc.SpecModel(word_spec.served, word_spec.options, word_spec.program)
    spec.stats.synthetic_acceptance_rates = (0.5,)  # As where it was compiled with them.
    with pytest.raises(OptionError, match="synthetic acceptance"):
        asgi_app(spec, ServerOptions())


def test_the_end_of_the_lifespan_closes_the_engine(word_spec: mtpc.SpecModel) -> None:
    """A running answer is completed first, and the model stays usable."""
    expected = words(word_spec.generate([7, 8, 9], 9))
    app = asgi_app(word_spec, ServerOptions(model_name="tiny"))
    with listening(app) as (client, server):
        stream = ask(client, stream=True)
        first = next(iter(stream))
        server.should_exit = True
        rest = [part.choices[0].text for part in stream if part.choices]
    assert "".join([first.choices[0].text, *rest]) == expected
    assert app.service.is_draining
    assert app.service.engine.has_ended
    assert words(word_spec.generate([7, 8, 9], 9)) == expected
