"""`mtpc chat`: a conversation in the terminal, or with one message per line from a pipe."""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import mtpc
from mtpc.cli.arguments import sampling_fields
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint
from mtpc.cli.opening import check_tokenizer, compile_model
from mtpc.errors import CapacityError, CheckpointError, RequestError
from mtpc.layout.terminal import show_progress
from mtpc.server.options import require_packages

if TYPE_CHECKING:
    from mtpc.server.chat import ChatTemplate

HELP = (
    "/reset forgets the conversation, /help shows this. Arrow keys: earlier messages. Ctrl-C ends "
    "an answer, Ctrl-D leaves."
)


def command(args: argparse.Namespace) -> int:
    """Run the subcommand until the input ends, and return the exit code."""
    checkpoint = chosen_checkpoint(args.checkpoint)
    options = {"batch_buckets": (1,), **compile_options(args)}
    sampling = mtpc.SamplingParams(**sampling_fields(args))
    mtpc.CompileOptions.parse(options)
    require_packages("mtpc chat", ("jinja2",))
    check_tokenizer(checkpoint, ["text"], "a chat needs one")
    from mtpc.server.chat import load_chat_template

    template = load_chat_template(checkpoint, args.chat_template)
    if template is None:
        raise CheckpointError(f"{checkpoint} has no chat template; give one: --chat-template FILE")
    with show_progress(sys.stderr) as tell:
        tell("import torch")
        model = compile_model(checkpoint, options, args, tell)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    chat = Chat(model, template, sampling, args.max_new_tokens, system)
    with closing(model):
        chat.run(is_interactive=sys.stdin.isatty())
    return 0


@dataclass
class Chat:
    """One conversation: the messages that begin it (`system`), and all after these. An answer has
    at most `max_new_tokens` tokens; None is what `max_len` and the pool leave."""

    model: mtpc.SpecModel
    template: ChatTemplate
    sampling: mtpc.SamplingParams
    max_new_tokens: int | None
    system: list[dict[str, Any]]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def run(self, is_interactive: bool) -> None:
        """Answer each message of the standard input, until it ends.

        Raises:
            MtpcError: a message cannot be answered. In a terminal the error is shown instead.
        """
        for text in _typed() if is_interactive else _piped():
            if not text.strip() or (is_interactive and self._obeys(text.strip())):
                continue
            self.messages.append({"role": "user", "content": text})
            try:
                answer = self._answer(is_interactive)
            except (RequestError, CapacityError) as error:
                if not is_interactive:
                    raise
                print("error:", error, file=sys.stderr)
                self.messages.pop()
                continue
            self.messages.append({"role": "assistant", "content": answer})

    def _obeys(self, text: str) -> bool:
        """Whether a typed message is a command, which then is done."""
        if not re.fullmatch(r"/\w*", text):
            return False
        if text == "/reset":
            self.messages.clear()
        said = {"/reset": "the conversation is forgotten", "/help": HELP}
        print(said.get(text, f"there is no command {text}. {HELP}"), file=sys.stderr)
        return True

    def _answer(self, is_interactive: bool) -> str:
        """Print the answer to the messages as it comes, and return it."""
        from mtpc.engine.text import TextAssembler

        model, pieces, start = self.model, list[str](), time.perf_counter()
        text = TextAssembler(model.served.decode)
        # A chat template writes special tokens itself.
        prompt = self.template.render([*self.system, *self.messages], {})
        ids = model.served.encode(prompt, special_tokens=False)
        most = self.max_new_tokens or max(1, model.engine.longest - len(ids))
        outputs: Any = model.stream(ids, most, sampling=self.sampling)
        try:
            with closing(outputs):
                for output in outputs:
                    last = output.finish_reason is not None
                    pieces.append(text.push(output.token_ids, last=last))
                    print(pieces[-1], end="", flush=True)
        except KeyboardInterrupt:
            if not is_interactive:
                print(flush=True)
                raise
        print(flush=True)
        if is_interactive:
            rate = text.num_tokens / max(time.perf_counter() - start, 1e-9)
            print(f"[{text.num_tokens} tokens, {rate:.1f} tokens/s]", file=sys.stderr)
        return "".join(pieces)


def _typed() -> Iterator[str]:
    """Lines that a user types. Ctrl-C empties the line."""
    with suppress(ImportError):  # Importing it gives `input` a history and editing keys.
        import_module("readline")
    print(HELP, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _piped() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin:
        yield line.rstrip("\r\n")
