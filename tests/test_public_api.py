"""What is public is documented, and what documentation names exists."""

from __future__ import annotations

import argparse
import json
import pickle
import re
from importlib import import_module

import pytest
from helpers.places import ROOT

import mtpc
from mtpc.cli.arguments import build_parser

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
SPAN = re.compile(r"`([^`]+)`")


def code_of(page: str) -> list[str]:
    """Lines of fenced and indented blocks, and spans in the text between them."""
    text = PAGES[page]
    blocks = [*FENCED.findall(text), *INDENTED.findall(text)]
    lines = [line for block in blocks for line in block.splitlines()]
    paragraphs = FENCED.sub("", text).split("\n\n")
    return [*lines, *(span for paragraph in paragraphs for span in SPAN.findall(paragraph))]


def named(page: str, pattern: str) -> set[str]:
    """Names of that pattern in a page's code."""
    return {name for code in code_of(page) for name in re.findall(pattern, code)}


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def test_completions_are_what_they_complete() -> None:
    """A str or a list to whoever wants one, with all attributes; copies keep them."""
    from mtpc.engine.completion import Collector
    from mtpc.engine.stream import Output

    for is_text, kind in ((True, mtpc.Completion), (False, mtpc.TokenCompletion)):
        collector = Collector(is_text)
        for ids, text, reason in (([1], "a ", None), ([2, 3], "b", "stop")):
            collector.add(Output(0, ids, text if is_text else None, reason))
        made = pickle.loads(pickle.dumps(collector.completion()))
        assert type(made) is kind
        assert made == ("a b" if is_text else [1, 2, 3])
        assert (made.token_ids, made.finish_reason, made.logprobs) == ([1, 2, 3], "stop", None)
        assert 0 < made.first_token_s <= made.total_s
        assert json.loads(json.dumps(made)) == made
    text = mtpc.Completion("a b")
    assert type(str(text)) is type(text.text) is str
    assert f"{text}" == "a b"


COMMANDS = subcommands(build_parser())


@pytest.mark.parametrize("name", [n for n in mtpc.__all__ if n != "__version__"])
def test_what_is_public_is_documented(name: str) -> None:
    spelled = re.compile(rf"\b{name}\b")
    assert any(spelled.search(code) for page in PAGES for code in code_of(page)), (
        f"mtpc.{name} is public, and neither README.md nor docs names it"
    )


@pytest.mark.parametrize("page", PAGES)
def test_names_in_documentation_exist(page: str) -> None:
    for name in sorted(named(page, r"(?<![\w/.-])mtpc(?:\.[A-Za-z_]\w*)+")):
        value: object = mtpc
        path = "mtpc"
        for part in name.split(".")[1:]:
            path += f".{part}"
            if not hasattr(value, part):
                try:
                    import_module(path)
                except ImportError:
                    pytest.fail(f"{page} names {name}, which does not exist")
            value = getattr(value, part)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_documentation_exist(page: str) -> None:
    """`mtpc run ...`, with each option that follows it."""
    command_line = re.compile(r"\s*(?:RUN )?(?:[A-Z_]+=\S+ )*mtpc ([a-z][a-z-]*)\b(.*)")
    for code in code_of(page):
        line = command_line.match(code)
        if line is None or line.group(1) == "serves":  # What `mtpc serve` prints.
            continue
        command, rest = line.groups()
        assert command in COMMANDS, f"{page} names `mtpc {command}`, which does not exist"
        parsers = [COMMANDS[command], *subcommands(COMMANDS[command]).values()]
        known = {option for parser in parsers for option in parser._option_string_actions}
        for option in re.findall(r"(?<!\S)\[?(--[a-z][a-z-]+)", rest.split("#")[0]):
            assert option in known, f"{page}: `mtpc {command}` has no {option}"
