"""Replicas of one model under Ray Serve: `mtpc serve`'s paths behind Ray's router.

    pip install 'mtpc[ray]'
    python examples/ray_serve.py [CHECKPOINT] --replicas 2 --threads 1

Each replica is a process with an engine of its own. Ray's proxy takes the requests, sends each to a
replica, and streams the answers. All replicas of a machine read one graph cache: the steps are
built once, before the first replica starts. docs/scale.md says when replicas are the right choice.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import mtpc
from mtpc.cli.demo import demo_checkpoint
from mtpc.server.options import ServerOptions


def application(
    checkpoint: Path | str, options: dict[str, Any], server: ServerOptions, **deployment: Any
) -> Any:
    """A Ray Serve application whose replicas serve one model.

    Args:
        checkpoint: a directory that every machine of the cluster has, or the id of a model on the
            hub.
        options: of `mtpc.compile`.
        server: the model's name, the API key and the limits.
        deployment: of `ray.serve.deployment`: num_replicas, autoscaling_config, ...
    """
    from ray import serve

    def build() -> Any:
        """The ASGI application of a replica; runs in its process."""
        from mtpc.server.asgi import asgi_app

        return asgi_app(mtpc.compile(checkpoint, **options), server)

    class Replica:
        """One engine. Ray asks it for its health, and replaces it where that raises."""

        app: Any

        async def check_health(self) -> None:
            self.app.service.check_ready()

    return serve.deployment(serve.ingress(build)(Replica), **deployment).bind()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, default=demo_checkpoint())
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a replica")
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    from ray import serve

    options = {"spec_tokens": args.spec_tokens}
    mtpc.compile(args.checkpoint, **options)  # Fills the graph cache, which replicas read.
    serve.start(http_options={"port": args.port})
    cpus = {"num_cpus": args.threads}
    server = ServerOptions(model_name=args.checkpoint.name, port=args.port)
    serve.run(
        application(
            args.checkpoint, options, server, num_replicas=args.replicas, ray_actor_options=cpus
        )
    )
    print(f"Ray serves {args.checkpoint.name!r} on http://127.0.0.1:{args.port}/v1", flush=True)
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
