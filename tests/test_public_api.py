"""What is public is documented, and what documentation names exists."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

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


def test_types_name_every_option() -> None:
    """What a type checker knows is what the checks at run time know."""
    from mtpc.arguments import CompileArguments, SamplingArguments
    from mtpc.config import ALIASES
    from mtpc.engine.prompts import GenerateArguments

    names = [field.name for field in fields(mtpc.CompileOptions)]
    assert sorted(CompileArguments.__annotations__) == sorted([*names, *ALIASES])
    params = [field.name for field in fields(mtpc.SamplingParams)]
    assert [*SamplingArguments.__annotations__] == params
    signature = inspect.signature(mtpc.SpecModel.stream).parameters.values()
    own = [p.name for p in signature if p.kind is p.KEYWORD_ONLY]
    assert sorted(GenerateArguments.__annotations__) == sorted([*own, *params])


def test_help_lists_every_option() -> None:
    assert {*mtpc.__all__} <= {*dir(mtpc)}
    text = inspect.getdoc(mtpc.compile) or ""
    for field in fields(mtpc.CompileOptions):
        assert re.search(rf"^ +{field.name}: \S", text, re.MULTILINE), field.name


def test_the_demo_model_is_at_hand() -> None:
    assert (mtpc.demo() / "config.json").is_file()
    assert mtpc.demo().name == "demo"


USER = '''"""A user's program, with three slips."""
import asyncio
from pathlib import Path
import mtpc

spec = mtpc.compile(mtpc.demo(), spec_tokens=2, batch_buckets=(1, 2), cache_dir=Path("cache"))
tuned = mtpc.compile("org/model", num_speculative_tokens="auto", wiring={"head": "own"})
wrong = mtpc.compile("org/model", spec_token=2)
one = spec.generate("The with statement", 32, stop="\\n", temperature=0.7)
print(one.upper(), one.finish_reason, one.token_ids[0])
ids = spec.generate([1, 2, 3], max_new_tokens=8, stop_token_ids=[5], ignore_eos=True)
print(sum(ids), ids.first_token_s)
several = spec.generate(["a", "b"], sampling=mtpc.SamplingParams(temperature=0.5))
print([each.text for each in several], spec.stats.acceptance_length)
chat = spec.generate([{"role": "user", "content": "hi"}], grammar=None)
print(chat.text, chat.logprobs)
rows = spec.generate([[1, 2], [3]], logprobs=2)
print([row.logprobs for row in rows], rows[0].finish_reasen)
for piece in spec.stream("The", 8, temprature=5):
    print(piece.text or "", piece.index)


async def main() -> None:
    async with mtpc.AsyncEngine(spec, max_requests=4) as engine:
        async for output in engine.generate("The", 8, top_p=0.9):
            print(output.token_ids)


asyncio.run(main())
host = mtpc.compile_host(mtpc.demo(), form="fused", spec_tokens=2)
'''
SLIPS = {8: "spec_token", 18: "finish_reasen", 19: "temprature"}
MORE = """import mtpc
spec = mtpc.compile(mtpc.demo())
spec.generate("The", 8, temprature=5)
spec.generate("The", max_new_tokens="8")
mtpc.compile_host(mtpc.demo(), spec_token=2)
mtpc.compile(mtpc.demo(), max_len="128")
mtpc.AsyncEngine(spec).generate("The", temprature=5)
mtpc.SamplingParams(temprature=5)
mtpc.AsyncEngine(spec.engine)
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[int, str]]]:
    """checked(program): line and text of each error of `mypy --strict`, where mtpc is installed
    with `pip install -e` and MYPYPATH is not set."""
    place = tmp_path_factory.mktemp("types")
    source = (
        "import sys; sys.path.insert(0, '.'); import build_backend; "
        "build_backend.build_editable(sys.argv[1])"
    )
    build = [sys.executable, "-W", "ignore", "-c", source, str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    (packages,) = place.glob("venv/lib/python3*/site-packages")
    (wheel,) = place.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    python = place / "venv" / "bin" / "python"

    def check(program: str) -> list[tuple[int, str]]:
        (place / "user.py").write_text(program)
        options = ["--strict", "--python-executable", python, "--cache-dir", place / "cache"]
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *options, "user.py"],
            cwd=place,
            env={"PATH": str(Path(sys.executable).parent)},
            capture_output=True,
            text=True,
        )
        assert not done.stderr, done.stderr
        found = re.findall(r"^user.py:(\d+): error: (.*)", done.stdout, re.MULTILINE)
        return [(int(line), text) for line, text in found]

    return check


def test_a_type_checker_finds_slips(checked: Callable[[str], list[tuple[int, str]]]) -> None:
    assert len(USER.splitlines()) == 30
    found = checked(USER)
    assert [line for line, _ in found] == [*SLIPS]
    assert all(SLIPS[line] in text for line, text in found)


def test_a_type_checker_finds_every_kind(checked: Callable[[str], list[tuple[int, str]]]) -> None:
    """In each line but the first two, and nowhere else; overloads are told of twice."""
    found = {line for line, text in checked(MORE) if "coroutine" not in text}
    assert found == {*range(3, 1 + len(MORE.splitlines()))}


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
            if not hasattr(value, part) and not isinstance(value, SimpleNamespace):
                try:
                    import_module(path)
                except ModuleNotFoundError as error:
                    if (error.name or "mtpc").startswith("mtpc"):
                        pytest.fail(f"{page} names {name}, which does not exist")
                    value = definitions_of(path)  # Of a module of a host that is not here.
                    continue
            value = getattr(value, part)


def definitions_of(module: str) -> SimpleNamespace:
    """The names of a module's classes and functions, which is not imported."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    kinds = (ast.ClassDef, ast.FunctionDef)
    return SimpleNamespace(**{n.name: n for n in tree.body if isinstance(n, kinds)})


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
