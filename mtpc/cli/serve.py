"""`mtpc serve`: compile or load a checkpoint, and serve OpenAI's API over HTTP."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mtpc
from mtpc.cli.compile_arguments import compile_options, given_fields
from mtpc.cli.demo import chosen_checkpoint
from mtpc.cli.opening import check_tokenizer, compile_model, drafts
from mtpc.cli.ranks import follow, is_other
from mtpc.environment import api_key
from mtpc.errors import OptionError
from mtpc.layout.terminal import show_progress
from mtpc.option_checks import AUTO
from mtpc.server.hosts import is_local
from mtpc.server.options import ServerOptions, require_packages

if TYPE_CHECKING:
    from mtpc.server.run import Running


def command(args: argparse.Namespace) -> int:
    """Run the subcommand until the server stops, and return the exit code."""
    checkpoint = chosen_checkpoint(args.checkpoint)
    options = compile_options(args)
    if "spec_tiers" in options:
        options.setdefault("spec_tokens", AUTO)
    mtpc.CompileOptions.parse(options)
    server = ServerOptions(**{**given_fields(args, ServerOptions), "api_key": _key(args)})
    require_packages()
    if options.get("images"):
        require_packages("--images", ("PIL",), "images")
    check_tokenizer(checkpoint, ["text"], "a server needs one")
    with ExitStack() as stack:
        with show_progress(sys.stderr) as tell:
            tell("import torch")
            from mtpc.server.run import bind, run_server

            # Raises now if the port is in use, before a compilation that takes minutes.
            listener = None if is_other() else stack.enter_context(closing(bind(server)))
            if drafts(checkpoint, options):
                options = {**adaptive(options), **options}
            model = compile_model(checkpoint, options, args, tell)
            if follow(model):
                return 0
        for reason in model.stats.fallbacks:
            _say(f"note: {reason}")
        stack.callback(model.close)
        stack.enter_context(_logged(server.log_level))
        run_server(model, server, lambda running: _announce(running, server), listener)
    _say("stopped")
    return 0


@contextmanager
def _logged(level: str) -> Iterator[None]:
    """A context in which the server's log goes to stderr."""
    log, handler = logging.getLogger("mtpc.server"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def adaptive(given: dict[str, Any]) -> dict[str, Any]:
    """The server's default of K: adapted to load, with steps built while the server runs.

    K is fixed with several ranks, and if no other process can build steps: on other backends than
    cpu, without a cache, or with a cache that is only read.
    """
    from mtpc.backends import first_choice

    row = first_choice(given.get("backend", mtpc.CompileOptions.backend))
    is_kept = given.get("use_cache", True) and row is not None and row.makes_files
    is_fixed = given.get("spec_tokens", AUTO) != AUTO or given.get("tensor_parallel_size", 1) > 1
    if is_fixed or not is_kept or given.keys() & {"frozen", "require_sha256"}:
        return {}
    return {"spec_tokens": AUTO, "build_in_background": True}


def _key(args: argparse.Namespace) -> str | None:
    """The API key from the option, the file or the environment, or None."""
    if args.api_key is not None:
        return args.api_key
    if args.api_key_file is None:
        return api_key()
    path: Path = args.api_key_file
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the API key from {path}: {error}") from None
    return lines[0].strip() if lines else ""


def _announce(running: Running, options: ServerOptions) -> None:
    if options.api_key is None and not is_local(running.host):
        _say(
            f"warning: every client that reaches {running.host} can use this server; "
            "set --api-key-file"
        )
    name = running.service.model_name
    print(f"mtpc serves {name!r} on {running.url}/v1", flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
