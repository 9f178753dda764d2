"""examples/ray_serve.py, for real: Ray on this machine, two replicas, OpenAI's client."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from ray_serve import application

import mtpc
from mtpc.cli.demo import demo_checkpoint
from mtpc.server.options import ServerOptions

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
# Ray warns of its own calls.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
OPTIONS: dict[str, Any] = {"spec_tokens": 3, "sampling": True, "token_mask": True}
PROMPTS = ["The for statement", "A list is", "Return the", "If the argument", "An iterator", "Note"]
NEW_TOKENS = 120


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What `generate` says. The call fills the graph cache, which the replicas read."""
    model = mtpc.compile(demo_checkpoint(), **OPTIONS)
    return [str(text) for text in model.generate(PROMPTS, max_new_tokens=NEW_TOKENS)]


@pytest.fixture(scope="module")
def deploy() -> Iterator[Callable[[int], openai.OpenAI]]:
    """Bring the number of replicas to what is asked for."""
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})

    def run(replicas: int) -> openai.OpenAI:
        server = ServerOptions(model_name="demo")
        each = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0.5}}
        serve.run(application(demo_checkpoint(), OPTIONS, server, **each))
        return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)

    yield run
    serve.shutdown()
    ray.shutdown()


def replicas_of(state: str) -> int:
    from ray import serve

    (app,) = serve.status().applications.values()
    (deployment,) = app.deployments.values()
    return deployment.replica_states.get(state, 0)


def streamed(client: openai.OpenAI, prompt: str) -> str:
    parts = client.completions.create(
        model="demo", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True
    )
    return "".join(part.choices[0].text for part in parts if part.choices)


def test_two_replicas_answer_as_generate_does(
    deploy: Callable[[int], openai.OpenAI], texts: list[str]
) -> None:
    client = deploy(2)
    assert replicas_of("RUNNING") == 2
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: streamed(client, prompt), PROMPTS)) == texts
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="another", prompt="x")


def test_scaling_down_drains(deploy: Callable[[int], openai.OpenAI], texts: list[str]) -> None:
    """Streams that run while a replica is taken away come to their ends."""
    client = deploy(2)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        running = [pool.submit(streamed, client, prompt) for prompt in PROMPTS]
        time.sleep(0.05)
        deploy(1)
        assert [each.result(60) for each in running] == texts
    end = time.monotonic() + 60
    while replicas_of("RUNNING") + replicas_of("STOPPING") > 1 and time.monotonic() < end:
        time.sleep(0.2)
    assert replicas_of("RUNNING") == 1
    assert streamed(client, PROMPTS[0]) == texts[0]
